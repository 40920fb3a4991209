"""Do layers and heads keep the same keys?"""

from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command


@command(leave_out=("min_keys", "per_query"), samples=50)
def overlap(
    models: options.Models = None,
    k: Annotated[
        int,
        typer.Option(
            help="Full-attention models have no masks: compare those that top-k would choose, with this k.",
            rich_help_panel=options.MEASURE,
        ),
    ] = 5,
    *,
    shared: Shared,
) -> None:
    """Test whether layers, heads and successive queries keep the same keys, and so could share one selection.

    Shown: the Jaccard index of the sets of kept keys, for every two layers and heads at the same query, and for
    each query and the one before it. Beside it stands the index of sets drawn at random.

    [bold]semdiag overlap checkpoints/even-pairs-topk-5-seed-153476998[/]
    """
    from semdiag.measuring.findings.estimates import check_supposed_k
    from semdiag.questions.overlap.answer import print_overlap
    from semdiag.questions.overlap.measure import OverlapPlan

    findings = shared.measured(models, shared.conditions(plans=(OverlapPlan(k),)))
    if "k" in shared.typed:
        check_supposed_k(findings, k)
    shared.deliver("overlap", findings, print_overlap)


QUESTION = Question(
    "overlap",
    __name__,
    measured_by="measure:MASK_OVERLAP",
    summarised_by="answer:overlap_summary",
    shown_by="figures:SECTION",
    asked_by=":overlap",
)
