"""What did fine-tuning, quantising or pruning change of a model's attention?"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command


@command(leave_out=("min_keys", "per_query", "jobs", "ray"), batch_size=8)
def compare(
    base: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="The base: any model that other commands take.",
            show_default=False,
            autocompletion=options.models,
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[B]",
            help="The model that was made of it: fine-tuned, quantised, pruned. Default: A itself, for another "
            "--dtype-b.",
            show_default=False,
            autocompletion=options.models,
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(help="k of the top-k keys whose overlap is shown.", rich_help_panel=options.MEASURE),
    ] = 8,
    dtype_b: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Precision in which B runs, as of --dtype. Default: that of A.",
            show_default=False,
            rich_help_panel=options.MEASURE,
        ),
    ] = None,
    every: options.Every = False,
    *,
    shared: Shared,
) -> None:
    """Compare two models on the same inputs: what did fine-tuning, quantising or pruning change?

    For every layer and head: the total variation of the attention weights, the change of δ, the overlap of the
    top-k, and the change of the attention's output, parted into that of the weights and that of the values. Of the
    model's outputs: the divergence KL(A || B), changed predictions, the loss. The heads that changed most come
    first.

    [bold]semdiag compare hf:models/base hf:models/four-bits --inputs texts.txt[/]
    """
    from semdiag.capturing.loading import find_checkpoints
    from semdiag.questions.compare.answer import print_comparison
    from semdiag.questions.compare.measure import ComparePlan, compare_survey
    from semdiag_models import InputError

    ComparePlan(top)  # refuses a wrong one before anything is loaded
    for path in filter(None, (base, model)):
        if len(checkpoints := find_checkpoints([path])) > 1:
            raise InputError(
                f"semdiag compare takes two models, and {path} holds {len(checkpoints)} runs. Name one."
            )
    alone = model is None or find_checkpoints([base])[0].resolve() == find_checkpoints([model])[0].resolve()
    if alone and dtype_b is None:
        raise InputError(
            "There is nothing to compare: name a second model, or another precision of this one with --dtype-b."
        )
    measure = partial(compare_survey, top=top, dtype=dtype_b)
    # Four stages: one sample of both, each of them alone, both together.
    models, against, stages = ([base], None, 3) if alone or model is None else ([model], base, 1)
    findings = shared.measured(models, shared.conditions(), measure, more_stages=stages, against=against)
    shared.deliver("compare", findings, partial(print_comparison, every=every), answered=True)


QUESTION = Question(
    "compare",
    __name__,
    measured_by="measure:COMPARISON",
    summarised_by="answer:compare_summary",
    shown_by="figures:SECTION",
    asked_by=":compare",
)
