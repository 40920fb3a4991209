"""Tables of ``semdiag mask-stability`` on the terminal."""

import math

from semdiag.measuring.findings.findings import Findings, Summary
from semdiag.measuring.words import interval, number_from_json, percent
from semdiag.presenting.question import title
from semdiag.presenting.section import (
    Column,
    NumberTable,
    fine_percent,
    not_shown,
    percent_interval,
    plain,
    wide_console,
)
from semdiag.questions.mask_precision.words import print_precision
from semdiag.questions.mask_stability.answer import mask_summary

_COLUMNS = (
    Column("noise"), Column("layer", form=plain),
    Column("head", form=lambda head: "" if head == "all" else str(head)),
    Column("separation_p50", "Δ p50", drop=4), Column("certified", form=percent),
    Column("predicted", form=percent), Column("exact", "observed", percent),
    Column("exact_low exact_high", "observed 95%", percent_interval, drop=3), Column("agreement", form=percent),
    Column("response"), Column("spearman", "Spearman Δ", drop=2),
    Column("spearman_low spearman_high", "Spearman 95%", interval, drop=1),
)  # fmt: skip


_MOST_HEADS = 24  # of more, only the least stable are shown
_LEAST_STABLE = 5


def print_masks(findings: Findings, every: bool = False) -> None:
    """Print one table per model: exact agreement, certified, predicted and observed, and related numbers."""
    screen = wide_console()
    for result in findings(mask_summary)["results"]:
        screen.print(f"\n{title(result)}: {result['mask']}")
        for refused in result["refused"]:
            if refused != result["mask"]:
                screen.print(f"{refused}.")
        if result["precision"]:
            print_precision(screen, result["precision"])
        levels = result["levels"]
        if not levels:
            continue
        rows = [{"noise": one["noise"], **row} for one in levels for row in [*_shown(one, every), one["all"]]]
        screen.print(NumberTable(_COLUMNS, rows))
        left_out = sum(len(one["layers"]) + 1 for one in levels) - len(rows)
        if left_out:
            screen.print(f"Shown are the {_LEAST_STABLE} heads whose masks change most. {not_shown(left_out)}")
        changed, certified = result["certified_changed"], result["certified_rows"]
        screen.print(f"Certified rows that changed: {changed:,} of {certified:,}.")
        for level in levels:
            if level["output"]:  # nothing is known of the output of an external model
                screen.print(_output(level))


def _shown(level: Summary, every: bool) -> list[Summary]:
    """Return the rows of the heads, or of many heads the least stable, in the order of the model."""
    heads: list[Summary] = level["layers"]
    if every or len(heads) <= _MOST_HEADS:
        return heads
    least_stable = sorted(heads, key=lambda row: number_from_json(row["exact"]))[:_LEAST_STABLE]
    return [row for row in heads if any(row is one for one in least_stable)]


def _output(level: Summary) -> str:
    output = level["output"]
    moved = number_from_json(output["logit_change"])
    change = f"logits move by {fine_percent(moved)} of their norm"
    change = change if math.isfinite(moved) else "some logits are not numbers"
    words = f"Noise {level['noise']:g}: {change}, {fine_percent(output['flipped'])} of the predictions change"
    if output["accuracy_after"] is not None:
        words += f", accuracy {percent(output['accuracy_before'])} → {percent(output['accuracy_after'])}"
    return words + "."
