"""Do masks survive noise: certified, predicted, observed?"""

from functools import partial
from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command

_NOISE = "Which noise"
_OF_NOISE = {"noise", "draws", "absolute", "at_block"}


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
    precision: Annotated[
        str,
        typer.Option(
            metavar="FORMAT,FORMAT",
            help="Number formats to which queries, keys and scores are rounded, like bf16,fp16,fp8-e4m3,fp8-e5m2. "
            "Noise is then added only if an option of it is given.",
            rich_help_panel="Which rounding",
        ),
    ] = "",
    every: options.Every = False,
    k: Annotated[
        int,
        typer.Option(
            help="Full-attention models have no mask: test the one that top-k would choose, with this k.",
            rich_help_panel=options.MEASURE,
        ),
    ] = 5,
    *,
    shared: Shared,
) -> None:
    """Test whether attention masks survive a little input noise, or a number format: certified, observed.

    A query's mask is the set of keys that it keeps. Certified: the scores provably move too little to change the
    mask. Predicted: the probability that the two keys at the boundary (the smallest kept score, the largest
    dropped one) do not swap. Observed: how many masks are the same in noisy copies of the input. Masks that do
    not depend on the input cannot change. With --precision the masks of rounded queries, keys and scores are
    compared with those of float64: changed, tied, certified.

    [bold]semdiag mask-stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """
    from semdiag.measuring.findings.estimates import check_supposed_k
    from semdiag.questions.mask_precision.measure import PrecisionPlan
    from semdiag.questions.mask_stability.measure import NoisePlan
    from semdiag.questions.mask_stability.words import print_masks

    levels = options.positive_numbers(noise, "--noise")
    plans: dict[str, NoisePlan | PrecisionPlan] = {}
    if "precision" not in shared.typed or _OF_NOISE & shared.typed:
        plans["mask-stability"] = NoisePlan(levels, draws, absolute, at_block, k, shared.values["seed"])
    if "precision" in shared.typed:
        plans["mask-precision"] = PrecisionPlan(options.listed_names(precision), k)
    findings = shared.measured(models, shared.conditions(plans=tuple(plans.values())))
    if "k" in shared.typed:
        check_supposed_k(findings, k)
    shared.deliver("mask-stability", findings, partial(print_masks, every=every), sections=tuple(plans))


QUESTION = Question(
    "mask-stability",
    __name__,
    measured_by="measure:MASK_STABILITY",
    summarised_by="answer:mask_summary",
    shown_by="figures:SECTION",
    asked_by=":mask_stability",
)
