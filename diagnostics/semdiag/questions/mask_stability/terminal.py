"""Tables of ``semdiag mask-stability`` on the terminal."""

import math
from typing import Any

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.presenting.terminal.console import interval, number, number_table, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.questions.mask_precision.terminal import print_precision
from semdiag.questions.mask_stability.answer import mask_summary

Summary = dict[str, Any]
_MASKS = (
    "noise", "layer", "head", "Δ p50", "certified", "predicted", "observed", "observed 95%", "agreement",
    "response", "Spearman Δ", "Spearman 95%",
)  # fmt: skip
_LEAST = ("Spearman 95%", "Spearman Δ", "observed 95%", "Δ p50")


def print_masks(findings: Findings) -> None:
    """Print one table per model: exact agreement as certified, predicted and observed, and what goes with it.

    Args:
        findings: of what was measured.
    """
    screen = wide_console()
    summary = findings(mask_summary)
    for result in summary["results"]:
        screen.print(f"\n{title(result)}: {result['mask']}")
        for refused in result["refused"]:
            if refused != result["mask"]:
                screen.print(f"{refused}.")
        if result["precision"]:
            print_precision(screen, result["precision"])
        if not result["levels"]:
            continue
        rows = number_table(_MASKS, least=_LEAST)
        for level in result["levels"]:
            for row in [*level["layers"], level["all"]]:
                rows.add_row(number(level["noise"]), *_mask_cells(row))
        screen.print(rows)
        changed, certified = result["certified_changed"], result["certified_rows"]
        screen.print(f"Certified rows that changed: {changed:,} of {certified:,}.")
        for level in result["levels"]:
            if level["output"]:  # nothing is known of the output of an external model
                screen.print(_output(level))


def _mask_cells(row: Summary) -> list[str]:
    return [
        str(row["layer"]),
        "" if row["head"] == "all" else str(row["head"]),
        number(row["separation_p50"]),
        *(_share(row[name]) for name in ("certified", "predicted", "exact")),
        _range(row, "exact", 100),
        _share(row["agreement"]),
        number(row["response"]),
        number(row["spearman"]),
        _range(row, "spearman", 1),
    ]


def _range(row: Summary, name: str, factor: float) -> str:
    ends = [row[f"{name}_low"], row[f"{name}_high"]]
    return "–" if None in ends else interval(*(factor * number_from_json(end) for end in ends))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{number_from_json(value):.1%}"


def _output(level: Summary) -> str:
    found = level["output"]
    moved = number_from_json(found["logit_change"])
    change = f"logits move by {moved:.2%} of their norm" if math.isfinite(moved) else "some logits are not numbers"
    said = f"Noise {level['noise']:g}: {change}, {found['flipped']:.2%} of the predictions change"
    if found["accuracy_after"] is not None:
        said += f", accuracy {found['accuracy_before']:.1%} → {found['accuracy_after']:.1%}"
    return said + "."
