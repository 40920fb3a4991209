"""``semdiag mask-stability``."""

from typing import Annotated

import typer

from semdiag.commands import options
from semdiag.commands.shared import Shared, with_options

_NOISE = "Which noise"


@with_options()
def mask_stability(
    models: options.Models = None,
    noise: Annotated[
        str,
        typer.Option(
            help="Standard deviation of the Gaussian noise, relative to each token's root mean square. One level "
            "or several, like 0.01 or 0.001,0.01,0.1.",
            rich_help_panel=_NOISE,
        ),
    ] = "0.001,0.01,0.1",
    draws: Annotated[int, typer.Option(help="Noisy copies of each input and level.", rich_help_panel=_NOISE)] = 5,
    absolute: Annotated[
        bool, typer.Option("--absolute", help="The levels of --noise are absolute.", rich_help_panel=_NOISE)
    ] = False,
    at_block: Annotated[
        int,
        typer.Option(
            help="Block at whose input the noise enters; what is below stays clean. 0: the embedded tokens.",
            rich_help_panel=_NOISE,
        ),
    ] = 0,
    k: Annotated[
        int,
        typer.Option(
            help="Full-attention models have no mask: judge the one that top-k would choose, with this k.",
            rich_help_panel="What is measured",
        ),
    ] = 5,
    *,
    shared: Shared,
) -> None:
    """Tell whether attention masks survive a little input noise: certified, predicted, observed.

    For each query the set S of kept keys is compared with the sets S' of noisy copies of the same input.
    Certified: the change of the scores is provably too small to change S. Predicted: the chance that the
    two keys at the boundary do not swap. Masks that do not depend on the input cannot change.

    [bold]semdiag mask-stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """
    from semdiag.commands import measuring
    from semdiag.commands.printing.mask_stability import print_masks
    from semdiag.measurement.probes.noise.masks import NoisePlan

    levels = measuring.positive_numbers(noise, "--noise")
    conditions = shared.conditions(
        plans=(NoisePlan(levels, draws, absolute, at_block, k, shared.values["seed"]),),
    )
    findings = shared.measured(models, conditions)
    if "k" in shared.typed:
        measuring.check_supposed_k(findings, k)
    shared.deliver("mask-stability", findings, print_masks)
