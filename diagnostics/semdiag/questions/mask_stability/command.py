"""``semdiag mask-stability``."""

from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Shared, command

_NOISE = "Which noise"


@command()
def mask_stability(
    models: options.Models = None,
    noise: Annotated[
        str,
        typer.Option(
            metavar="LEVEL,LEVEL",
            help="Standard deviation of the Gaussian noise, relative to each token's root mean square. One level "
            "or several, like 0.01 or 0.001,0.01,0.1.",
            rich_help_panel=_NOISE,
        ),
    ] = "0.001,0.01,0.1",
    draws: Annotated[
        int, typer.Option(help="Noisy copies of each input at each noise level.", rich_help_panel=_NOISE)
    ] = 5,
    absolute: Annotated[
        bool,
        typer.Option(
            "--absolute", help="Take the levels of --noise as absolute, not relative.", rich_help_panel=_NOISE
        ),
    ] = False,
    at_block: Annotated[
        int,
        typer.Option(
            help="Add the noise to the input of this block; earlier blocks see none. 0: the embedded tokens.",
            rich_help_panel=_NOISE,
        ),
    ] = 0,
    k: Annotated[
        int,
        typer.Option(
            help="Full-attention models have no mask: test the one that top-k would choose, with this k.",
            rich_help_panel="What is measured",
        ),
    ] = 5,
    *,
    shared: Shared,
) -> None:
    """Test whether attention masks survive a little input noise: certified, predicted, observed.

    A query's mask is the set of keys that it keeps. Certified: the scores provably move too little to change the
    mask. Predicted: the probability that the two keys at the boundary (the smallest kept score, the largest
    dropped one) do not swap. Observed: how many masks are the same in noisy copies of the input. Masks that do
    not depend on the input cannot change.

    [bold]semdiag mask-stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """
    from semdiag.measuring.findings.supposed_masks import check_supposed_k
    from semdiag.presenting import option_values
    from semdiag.questions.mask_stability.measure.probe import NoisePlan
    from semdiag.questions.mask_stability.terminal import print_masks

    levels = option_values.positive_numbers(noise, "--noise")
    conditions = shared.conditions(
        plans=(NoisePlan(levels, draws, absolute, at_block, k, shared.values["seed"]),),
    )
    findings = shared.measured(models, conditions)
    if "k" in shared.typed:
        check_supposed_k(findings, k)
    shared.deliver("mask-stability", findings, print_masks)
