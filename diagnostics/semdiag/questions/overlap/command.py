"""``semdiag overlap``."""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Shared, command

if TYPE_CHECKING:
    from semdiag.measuring.findings.findings import Findings


@command(leave_out=("min_keys", "per_query"), samples=50)
def overlap(
    models: options.Models = None,
    k: Annotated[
        int,
        typer.Option(
            help="Full-attention models have no masks: compare those that top-k would choose, with this k.",
            rich_help_panel="What is measured",
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
    from semdiag.measuring.findings.supposed_masks import check_supposed_k
    from semdiag.questions.overlap.measure import OverlapPlan

    findings = shared.measured(models, shared.conditions(plans=(OverlapPlan(k),)))
    if "k" in shared.typed:
        check_supposed_k(findings, k)
    shared.deliver("overlap", findings, _print)


def _print(findings: "Findings") -> None:
    from semdiag.measuring.findings.strict_json import number_from_json
    from semdiag.measuring.table import ALL
    from semdiag.presenting.terminal.console import number, number_table, wide_console
    from semdiag.presenting.terminal.titles import title
    from semdiag.questions.overlap.answer import overlap_summary

    console = wide_console()
    for result in findings(overlap_summary)["results"]:
        if not result["overlap"]:
            remarks = findings.measurements.remarks
            own = remarks[(remarks["model"] == result["model"]) & (remarks["code"] == "no-overlap")]
            refused = own["text"].tolist()
            why = refused[0] if refused else "no two masks to compare (a query that drops no key has none)"
            console.print(f"\n{title(result)}: {why}")
            continue
        console.print(f"\n{title(result)}: Jaccard index of kept keys")
        heads = ["between", "layer", "and layer", "pairs", "index", "95%", "at random"]
        table = number_table(heads, names=1, least=["pairs", "95%"], kept=["index", "at random"])
        for row in result["overlap"]:
            layers = ("all", "all") if row["layer"] == ALL else (str(row["layer"]), str(row["other_layer"]))
            low, high = number_from_json(row["low"]), number_from_json(row["high"])
            span = "no interval" if math.isnan(low + high) else f"{low:.3f}–{high:.3f}"
            index = f"{row['jaccard']:.3f}", span, f"{row['chance']:.3f}"
            table.add_row(row["what"], *layers, number(row["pairs"]), *index)
        console.print(table)
