"""Tables of ``semdiag k-sweep``."""

import math
from collections.abc import Iterator

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import FEWEST
from semdiag.measuring.findings.strict_json import Summary, number_from_json
from semdiag.measuring.table import ALL
from semdiag.presenting.columns import NEVER, Column, Value, ends, number, percent, plain, text
from semdiag.presenting.terminal.console import NumberTable, say_sentences, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.questions.bounds.answer.corollary import JUDGED_PERCENTILES
from semdiag.questions.k_sweep.answer.rerun import ROUNDING
from semdiag.questions.k_sweep.answer.summary import k_sweep_summary
from semdiag.questions.k_sweep.measure.kinds import KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.words import verdict_lines

_EVERY_UP_TO, _STEP = 8, 4  # every k up to 8, then every fourth; the CSV has all
_NO_STREAM = (
    "Δ stream is left out: through which matrix a head writes into the stream is known for certain of models that "
    "semdiag trained, run unchanged with the keys that they keep."
)


def print_k_sweep(findings: Findings, every: bool = False) -> None:
    """Print the verdict of each model and what masks changed, then its grounds; ``every``: and a table by k."""
    screen = wide_console()
    summary = findings(k_sweep_summary)
    for result in summary["results"]:
        first, *more = verdict_lines(findings, result["model"])
        screen.print(f"\n{title(result)}: within this model, by k")
        say_sentences([first])
        if result["rerun"]:
            screen.print(_rerun_table(result["rerun"]))
            say_sentences(_unknown(result["rerun"]))
        say_sentences(more)
        if result["sweep"]:
            table, without, rows = _table(result)
            if not every:
                say_sentences([f"Weight, δ(k), Δ(k), load and ξ of {rows} k were measured: --all shows them."])
                continue
            screen.print(table)
            if without:
                say_sentences([f"Δ head was not computed at k = {without}."])
            if "stream_change" not in {row["quantity"] for row in result["sweep"]}:
                say_sentences([_NO_STREAM])
    say_sentences([summary["scope"]])


def _change(value: Value) -> str:
    """Return a change, 0 where it is as small as rounding."""
    known = number_from_json(value)
    return number(0.0 if abs(known) < ROUNDING else known)


def _growth(change: Value) -> str:
    value = number_from_json(change)
    return number(math.inf if value > 700 else math.exp(value))


def _harmed(share: Value, high: Value) -> str:
    """Return the share of samples that change much, and the one-sided limit of that of inputs."""
    return "–" if math.isnan(number_from_json(share)) else f"{percent(share)} (≤ {percent(high)})"


def _interval(row: Summary) -> str:
    """Return the interval of a change, or in a few words why there is none."""
    low, high = number_from_json(row["low"]), number_from_json(row["high"])
    if math.isfinite(low) and math.isfinite(high):
        return " to ".join(ends(*(0.0 if abs(end) < ROUNDING else end for end in (low, high))))
    if row["seen"] == 0:
        return "none seen"
    return "all alike" if row["units"] >= FEWEST and row["least"] == row["worst"] else "none"


_RERUN = (
    Column("name", "mask", text), Column("kept", "keys", percent), Column("mass", "weight", percent, drop=4),
    Column("head_change", "Δ head", drop=2), Column("stream_change", "Δ stream", drop=1),
    Column("change", "Δ {}", _change, drop=NEVER),
    Column("", "95% interval", _interval, drop=NEVER),
    Column("harmed harmed_high", "harmed", _harmed, drop=5), Column("random", form=_change, drop=3),
    Column("growth", "ppl ×", _growth, drop=20), Column("divergence", "KL", _change),
    Column("changed", form=percent, drop=20), Column("accuracy", form=percent, drop=6),
)  # fmt: skip


def _rerun_table(rows: list[Summary]) -> NumberTable:
    """Return a row a mask: what it changed."""
    measure = rows[0]["measure"].replace("_", " ")
    several = bool({row["mask"] for row in rows if row["mask"] in KINDS} - {TOP_K, RANDOM})
    control = {} if several else {row["k"]: row["change"] for row in rows if row["mask"] == RANDOM}
    shown = [row for row in rows if row["mask"] not in ("none", "" if several else RANDOM)]
    added = (
        {
            "name": _name(row, several),
            "random": control.get(row["k"]),
            "growth": row["change"] if measure == "loss" else None,
        }
        for row in shown
    )
    return NumberTable(_RERUN, [row | extra for row, extra in zip(shown, added, strict=True)], unit=measure)


def _unknown(rows: list[Summary]) -> Iterator[str]:
    """Say why some rows have no weight."""
    top = [row for row in rows if row["mask"] == TOP_K and row["mass"] is None]
    above = [row["k"] for row in top if row["kept"] < 1]
    kept = [row["k"] for row in top if row["kept"] == 1]
    if above:
        yield f"Weight and Δ head of k = {', '.join(map(str, above))} are unknown: the sweep ends below (--max-k)."
    if kept:
        yield f"No query has more keys than k = {', '.join(map(str, kept))}: nothing is dropped."
    masks = {row["mask"] for row in rows}
    if TOP_K in masks and masks - {"none", TOP_K, RANDOM}:
        yield "Weight and Δ head are those of topk alone."


def _name(row: Summary, several: bool) -> str:
    """Return the kind of mask and its k; for top-p the share of the weight."""
    if row["k"] < 0:
        return str(row["mask"])
    return f"{row['mask']} {row['k']}{'%' * (row['mask'] == 'topp')}" if several else f"k = {row['k']}"


_SWEEP = (
    Column("k"), Column("ratio.p50", "δ(k)/δ_s p50"), Column("ratio.p95", "p95"),
    Column("separation.p50", "Δ(k) p50"), Column("separation.p5", "p5"), Column("mass.mean", "weight mean"),
    Column("mass.p5", "p5"), Column("mass_without_first.mean", "no first", drop=7),
    Column("head_change.mean", "Δ head"), Column("stream_change.mean", "Δ stream"),
    Column("load.p95", "load p95", drop=6), Column("load.p100", "p100", drop=4),
    Column("ln_sound.p50", "ln ξ p50", drop=5), Column("ln_paper.p50", "paper p50", drop=3),
    Column("W", "W met", plain, drop=1), Column("X", "X met", plain, drop=2),
)  # fmt: skip


def _table(result: Summary) -> tuple[NumberTable, str, int]:
    """Return a row a k, what it would keep; for which of these Δ head is unknown; and how many k were measured."""
    rows: dict[int, Summary] = {}
    for one in result["sweep"]:
        if one["layer"] == ALL:
            rows.setdefault(one["k"], {"k": one["k"]})[one["quantity"]] = one
    rows = {k: rows[k] for k in sorted(rows) if "mass" in rows[k]}
    always = {result["verdict"]["k"], result["k"], max(rows)}
    shown = [row for k, row in rows.items() if k <= _EVERY_UP_TO or k % _STEP == 0 or k in always]
    for row in shown:
        for name in "WX":
            row[name] = _met(result["conditions"], row["k"], name)
    names = {column.name.partition(".")[0] for column in _SWEEP}
    some = any("head_change" in row for row in shown)
    without = [str(row["k"]) for row in shown if some and "head_change" not in row]
    return NumberTable(_SWEEP, [dict.fromkeys(names) | row for row in shown]), ", ".join(without), len(rows)


def _met(conditions: list[Summary], k: int, name: str) -> str | None:
    met = [row["met"] for row in conditions if (row["k"], row["parameter"]) == (k, name)
           and row["percentile"] in JUDGED_PERCENTILES]  # fmt: skip
    return f"{sum(met)} of {len(met)}" if met else None
