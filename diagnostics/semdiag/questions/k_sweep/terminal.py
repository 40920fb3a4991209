"""The table of ``semdiag k-sweep`` on stderr."""

import math
from collections.abc import Callable
from typing import Any

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import interval_words
from semdiag.measuring.findings.resampling import FEWEST
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.measuring.table import ALL
from semdiag.presenting.terminal.console import ends, number, number_table, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.questions.bounds.answer.corollary import JUDGED_PERCENTILES
from semdiag.questions.k_sweep.answer.sparse_verdict import ROUNDING
from semdiag.questions.k_sweep.answer.summary import k_sweep_summary
from semdiag.questions.k_sweep.measure.kinds import KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.words import verdict_lines

Summary = dict[str, Any]
_FIRST, _STEP = 8, 4  # every k is shown up to the first, then every fourth; all stand in the CSV file
_NO_STREAM = (
    "Δ stream is left out: through which matrix a head writes into the stream is known for certain of models that "
    "semdiag trained, run unchanged with the keys that they keep."
)
_LEAST = ("paper p50", "p100", "no first", "load p95")  # left out first where there is no room


def print_k_sweep(findings: Findings) -> None:
    """Print the verdict and one table per model, all layers and heads together; after a rerun what it changed.

    Args:
        findings: of what was measured.
    """
    screen = wide_console()
    summary = findings(k_sweep_summary)
    for result in summary["results"]:
        first, *more = verdict_lines(findings, result["model"])
        screen.print(f"\n{title(result)}: within this model, for every k")
        screen.print(first, soft_wrap=True)
        if result["rerun"]:
            screen.print(_rerun_table(result))
        if result["sweep"]:
            screen.print(_table(result))
            if "stream_change" not in {row["quantity"] for row in result["sweep"]}:
                screen.print(_NO_STREAM, soft_wrap=True)
        for line in more:
            screen.print(line, soft_wrap=True)
    screen.print(summary["scope"])


def _rerun_table(result: Summary) -> Any:
    """What the masks changed: columns without a number are left out."""
    rows = result["rerun"]
    control = {row["k"]: row["change"] for row in rows if row["mask"] == "random"}
    measure = rows[0]["measure"].replace("_", " ")
    several = bool({row["mask"] for row in rows if row["mask"] in KINDS} - {TOP_K, RANDOM})
    named: dict[str, Callable[[Summary], str]] = {
        "mask": _name if several else lambda r: r["mask"] if r["k"] < 0 else f"k = {r['k']}",
        "keys": lambda r: _share(r["kept" if several or r["mask"] != TOP_K else "share"]),
        "weight": lambda r: _share(r["mass"]),
        "Δ head": lambda r: number(number_from_json(r["head_change"])),
        "Δ stream": lambda r: number(number_from_json(r["stream_change"])),
        f"Δ {measure}": lambda r: _change(r["change"]),
        "95% interval": _interval,
        "harmed": _harmed,
        "random": lambda r: "–" if several else _change(control.get(r["k"])),
        "ppl ×": lambda r: number(_growth(r["change"])) if measure == "loss" else "–",
        "KL": lambda r: _change(r["divergence"]),
        "changed": lambda r: _share(r["changed"]),
        "accuracy": lambda r: _share(r["accuracy"]),
    }
    shown = [row for row in rows if row["mask"] not in ("none", "" if several else RANDOM)]
    cells = [[text(row) for text in named.values()] for row in shown]
    kept = [at for at in range(len(named)) if any(line[at] != "–" for line in cells)]
    table = number_table([list(named)[at] for at in kept], names=1, least=["KL", "ppl ×"], kept=["95% interval"])
    for line in cells:
        table.add_row(*(line[at] for at in kept))
    return table


def _name(row: Summary) -> str:
    """The kind of mask and its k; of top-p the share of the weight."""
    if row["k"] < 0:
        return str(row["mask"])
    return f"{row['mask']} {row['k']}{'%' * (row['mask'] == 'topp')}"


def _harmed(row: Summary) -> str:
    """The share of samples that change much, and of inputs for which that is not excluded."""
    harmed, high = number_from_json(row["harmed"]), number_from_json(row["harmed_high"])
    return "–" if math.isnan(harmed) else f"{harmed:.1%} (≤ {high:.1%})"


def _growth(change: float | str | None) -> float:
    value = number_from_json(change)
    return math.inf if value > 700 else math.exp(value)


def _interval(row: Summary) -> str:
    low, high = _shown(row["low"]), _shown(row["high"])
    if math.isnan(low) or math.isnan(high):
        return "all alike" if row["samples"] >= FEWEST else interval_words(low, high, samples=row["samples"])
    return " to ".join(ends(low, high)) if low or high else f"< {ROUNDING:g}"


def _change(value: float | str | None) -> str:
    return number(_shown(value))


def _shown(value: float | str | None) -> float:
    """A change; below a tenth of a thousandth it is rounding, or might as well be."""
    value = number_from_json(value)
    return 0.0 if abs(value) < ROUNDING else value


def _share(value: float | str | None) -> str:
    value = number_from_json(value)
    return "–" if math.isnan(value) else f"{value:.1%}"


def _table(result: Summary) -> Any:
    """What every k would leave: columns without a number are left out."""
    pooled = {(row["quantity"], row["k"]): row for row in result["sweep"] if row["layer"] == ALL}
    known = sorted({k for name, k in pooled if name == "mass"})
    asked = {result["verdict"]["k"], result["k"], known[-1]}
    lines = []
    for k in (k for k in known if k <= _FIRST or k % _STEP == 0 or k in asked):
        cells = [number(pooled[name, k][p]) if (name, k) in pooled else "–" for _, name, p in _SHOWN]
        for name in "WX":
            values = [
                row["met"]
                for row in result["conditions"]
                if (row["k"], row["parameter"]) == (k, name) and row["percentile"] in JUDGED_PERCENTILES
            ]
            cells.append(f"{sum(values)} of {len(values)}" if values else "–")
        lines.append([str(k), *cells])
    columns = ["k", *(title for title, _, _ in _SHOWN), "W met", "X met"]
    kept = [at for at, title in enumerate(columns) if title[2:] == "met" or any(line[at] != "–" for line in lines)]
    table = number_table([columns[at] for at in kept], least=_LEAST, kept=["W met", "X met"])
    for line in lines:
        table.add_row(*(line[at] for at in kept))
    return table


_SHOWN = (  # title, quantity, what of its percentiles
    ("δ(k)/δ_s p50", "ratio", "p50"),
    ("p95", "ratio", "p95"),
    ("Δ(k) p50", "separation", "p50"),
    ("p5", "separation", "p5"),
    ("weight mean", "mass", "mean"),
    ("p5", "mass", "p5"),
    ("no first", "mass_without_first", "mean"),
    ("Δ head", "head_change", "mean"),
    ("Δ stream", "stream_change", "mean"),
    ("load p95", "load", "p95"),
    ("p100", "load", "p100"),
    ("ln ξ p50", "ln_sound", "p50"),
    ("paper p50", "ln_paper", "p50"),
)
