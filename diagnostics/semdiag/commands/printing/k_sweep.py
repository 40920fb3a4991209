"""The table of ``semdiag k-sweep`` on stderr."""

from typing import Any

from semdiag.commands.printing.console import number, number_table, wide_console
from semdiag.commands.printing.titles import title
from semdiag.findings.findings import Findings
from semdiag.findings.k_sweep import sweep_summary

Summary = dict[str, Any]
_FIRST, _STEP = 8, 4  # every k is shown up to the first, then every fourth; all stand in the CSV file
_COLUMNS = (
    "k", "δ(k)/δ_s p50", "p95", "Δ(k) p50", "p5", "mass p50", "p5", "load p95", "p100",
    "ln ξ p50", "paper p50", "W met", "X met",
)  # fmt: skip


def print_sweep(findings: Findings) -> None:
    """Print one table per model, all layers and heads together, and the recommendation.

    Args:
        findings: of what was measured.
    """
    screen = wide_console()
    summary = findings(sweep_summary)
    for result in summary["results"]:
        screen.print(f"\n{title(result)}: within this model, for every k")
        if result["sweep"]:
            screen.print(_table(result))
        screen.print(result["words"])
    screen.print(summary["scope"])


def _table(result: Summary) -> Any:
    pooled = {(row["quantity"], row["k"]): row for row in result["sweep"] if row["layer"] == -1}
    rerun = [name for name in ("accuracy", "same_prediction") if (name, 0) in pooled]
    table = number_table([*_COLUMNS, *(name.replace("_", " ") for name in rerun)])
    known = sorted({k for name, k in pooled if name == "mass"})
    asked = {result["k_for_mass"], result["k_for_conditions"], result["recommended_k"], result["k"], known[-1]}
    for k in (k for k in known if k <= _FIRST or k % _STEP == 0 or k in asked):
        cells = [pooled[name, k][p] for name, percentiles in _SHOWN.items() for p in percentiles]
        met = {
            name: [row["met"] for row in result["conditions"] if row["k"] == k and row["parameter"] == name]
            for name in "WX"
        }
        answers = [f"{sum(values)} of {len(values)}" for values in met.values()]
        means = [f"{pooled[name, k]['mean']:.1%}" for name in rerun]
        table.add_row(str(k), *map(number, cells), *answers, *means)
    return table


_SHOWN = {
    "ratio": ("p50", "p95"),
    "separation": ("p50", "p5"),
    "mass": ("p50", "p5"),
    "load": ("p95", "p100"),
    "ln_sound": ("p50",),
    "ln_paper": ("p50",),
}
