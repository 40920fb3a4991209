"""What was found on runs, in words: arrivals, speed-ups and their bounds, other lengths."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from semdiag.findings.convergence import arrivals, over_seeds, target_of
from semdiag.findings.speed_and_dispersion import speed_dispersion, speed_dispersion_table
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.runs.training_runs import NOT_BEGUN, TARGET, UNFINISHED


def target_words(measurements: Measurements) -> str:
    """The accuracy that counts as having learned, short: ``95 %``, or ``the target`` if tasks differ."""
    if measurements.provenance.get("targets"):
        return "the target"
    return percent(measurements.provenance.get("target", TARGET))


def targets_sentence(measurements: Measurements) -> str:
    """Say all targets: ``The target is 95 % training accuracy, for listops 36 %``."""
    general = percent(measurements.provenance.get("target", TARGET))
    others = measurements.provenance.get("targets", {})
    single = "".join(f", for {task} {percent(value)}" for task, value in others.items())
    return f"The target is {general} training accuracy{single}."


def percent(value: float) -> str:
    """An accuracy in words: ``95 %``."""
    return f"{100 * float(value):g} %"


def arrival_words(run: Mapping[Any, Any]) -> str:
    """When a run arrived: ``35``, or ``not in 100``; an unfinished run says that it is one."""
    if run["state"] == NOT_BEGUN:
        return "not begun"
    words = f"not in {run['epochs']}" if pd.isna(run["arrival"]) else str(run["arrival"])
    return f"{words} (of {run['planned']}, unfinished)" if run["state"] == UNFINISHED else words


def speed_words(low: float, high: float) -> str:
    """A speed-up or what bounds it: ``11.7``, ``above 20``, ``below 0.35``, ``unknown``."""
    if math.isnan(low) or (low == 0 and math.isinf(high)):
        return "unknown"
    if low == high:
        return f"{low:.3g}"
    if math.isinf(high):
        return f"above {low:.3g}"
    return f"below {high:.3g}" if low == 0 else f"{low:.3g} to {high:.3g}"


def interval_words(row: Mapping[Any, Any]) -> str:
    """The interval of a median speed-up over seeds, or why there is none.

    Args:
        row: of :func:`~semdiag.findings.convergence.over_seeds`.
    """
    if row["pairs"] == 0:
        return "–"
    if row["pairs"] == 1:
        return "one seed: no interval"
    low, high = row["interval_low"], row["interval_high"]
    ends = f"{low:.3g} to {'∞' if math.isinf(high) else f'{high:.3g}'}"
    return f"{ends} ({row['interval_coverage']:.0%})"


def convergence_sentences(measurements: Measurements) -> list[str]:
    """Say per task and attention how many epochs were needed, and what that is to full attention.

    Args:
        measurements: with runs.

    Returns:
        One sentence per setting, then the correlation with dispersion, then what is unfinished or left out.
    """
    found, table = arrivals(measurements), speed_dispersion_table(measurements)
    seeds = over_seeds(found, table)
    said = []
    for group, rows in seeds.groupby("group", sort=False) if len(seeds) else []:
        parts = [_attention_words(row, found[found["group"] == group]) for row in rows.to_dict("records")]
        target = percent(target_of(measurements, rows["task"].iloc[0]))
        said.append(f"{group}, epochs to {target} training accuracy: {'; '.join(parts)}.")
    if len(table):
        said.append(speed_dispersion(table).sentence)
    return said + _reservations(measurements, found)


def _attention_words(row: dict[Any, Any], runs: pd.DataFrame) -> str:
    own = runs[runs["attention"] == row["attention"]].to_dict("records")
    arrived = ", ".join(arrival_words(run) for run in own)
    words = f"{row['attention']} {arrived}"
    if row["pairs"]:
        speed = speed_words(row["speed_up_low"], row["speed_up_high"])
        which = "speed-up" if row["pairs"] == 1 else f"median speed-up over {row['pairs']} seeds"
        words += f" ({which} {speed}; {interval_words(row)})"
    return words


def _reservations(measurements: Measurements, found: pd.DataFrame) -> list[str]:
    said = []
    late = found[found["state"].isin([UNFINISHED, NOT_BEGUN])]
    if len(late):
        names = "; ".join(f"{r['model']} {r['epochs']} of {r['planned']} epochs" for r in late.to_dict("records"))
        said.append(f"Unfinished, so more may be known later: {names}.")
    left_out = measurements.provenance.get("left_out", [])
    if left_out:
        said.append(f"Left out, since they bring no training history: {', '.join(left_out)}.")
    return said


def length_sentences(measurements: Measurements) -> list[str]:
    """Say of every model what becomes of its accuracy and dispersion on other lengths.

    Args:
        measurements: with lengths.
    """
    found = arrivals(measurements).set_index("model")
    said = []
    for model, rows in measurements.lengths[measurements.lengths["layer"] == -1].groupby("model", sort=False):
        if model not in found.index:  # a copy of another run
            continue
        run = found.loc[model]
        parts = [_length_words(int(str(length)), own) for length, own in rows.groupby("length")]
        said.append(f"{run['group']}, {run['attention']}, seed {run['seed']}: {'; '.join(parts)}.")
    return said


def _length_words(length: int, rows: pd.DataFrame) -> str:
    value = rows.set_index(["quantity", "statistic"])["value"]
    accuracy = (
        f"{value['accuracy', 'value']:.1%} ({value['accuracy', 'low']:.1%} to {value['accuracy', 'high']:.1%})"
    )
    return f"length {length} accuracy {accuracy}, median δ {value['dispersion', 'p50']:.3g}"


def along_sentences(measurements: Measurements) -> list[str]:
    """Say of every run how its numbers moved from its first to its last snapshot.

    Args:
        measurements: with snapshots.
    """
    found = arrivals(measurements).set_index("model")
    said = []
    pooled = measurements.along[measurements.along["layer"] == -1]
    for model, rows in pooled.groupby("model", sort=False):
        if model not in found.index:
            continue
        run, epochs = found.loc[model], sorted(rows["epoch"].unique())
        value = rows.set_index(["epoch", "quantity", "statistic"])["value"]
        parts = [
            f"{name} {value[epochs[0], quantity, statistic]:.3g} → {value[epochs[-1], quantity, statistic]:.3g}"
            for name, quantity, statistic in _ALONG
        ]
        when = f"epoch {epochs[0]} → {epochs[-1]}, {len(epochs)} snapshots"
        said.append(f"{run['group']}, {run['attention']}, seed {run['seed']} ({when}): {', '.join(parts)}.")
    return said


_ALONG = (
    ("median δ", "dispersion", "p50"),
    ("mean response", "response", "mean"),
    ("largest Γ", "gamma", "max"),
    ("share of the squared gradient in queries and keys", "query_key_gradient", "share"),
)
