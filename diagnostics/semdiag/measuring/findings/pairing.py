"""Pair trained models that may be compared: same task, seed, size, setting and snapshot."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.findings.findings import Findings
from semdiag_models import TASKS

# Models that differ in one of these are never compared or drawn on the same axes.
RUN = ("task", "seed", "blocks", "heads", "width", "length", "norm", "pooling", "setting")
_TELLING = 50  # samples; fewer do not tell chance from 60%
RUN_AND_SNAPSHOT = (*RUN, "snapshot")


@dataclass(frozen=True)
class Pair:
    """A full-attention model and a counterpart that differs from it only in its attention."""

    label: str  # task, attention and seed in words
    full: str  # the full model's path
    other: str  # the counterpart's path


def find_pairs(models: pd.DataFrame, attention: str | None = "topk") -> tuple[list[Pair], list[str]]:
    """Pair every model of one attention kind with the full-attention model trained on the same data."""
    pairs, alone = [], []
    models = models[~external(models)]  # their training is unknown
    sparse = models["attention"] != "full" if attention is None else models["attention"] == attention
    some = models[sparse | (models["attention"] == "full")]
    for _, group in some.groupby([*RUN_AND_SNAPSHOT], dropna=False, sort=False):
        full = group[group["attention"] == "full"]["model"].tolist()
        others = group[group["attention"] != "full"]
        if not full or others.empty:
            alone += group["model"].tolist()
            continue
        for _, row in others.iterrows():
            label = f"{row['task']}, {attention_word(row)}, seed {row['seed']}"
            if row["snapshot"] != "last":
                label += f", {row['snapshot']}"
            pairs.append(Pair(label, full[0], row["model"]))
    return _with_distinct_labels(pairs, [pair.other for pair in pairs]), alone


def rivals(models: pd.DataFrame, pair: Pair) -> list[str]:
    """Return other models that could serve as the full model of a pair."""
    full = models[models["attention"] == "full"]
    chosen = full[full["model"] == pair.full].iloc[0]
    same = [all(_equal(row[name], chosen[name]) for name in RUN_AND_SNAPSHOT) for _, row in full.iterrows()]
    others = full[same]
    return [str(path) for path in others[others["weights_sha256"] != chosen["weights_sha256"]]["model"]]


def compared_pairs(findings: Findings) -> list[Pair]:
    """Return the pairs that a report compares: with the model of --against, or full models with counterparts."""
    measurements = findings.measurements
    against = measurements.provenance.get("against")
    if against is not None and against in set(measurements.models["model"]):
        return pairs_against(measurements.models, against)
    return find_pairs(measurements.models, attention=None)[0]


def unlearned_sentences(findings: Findings) -> list[str]:
    """Return a warning if compared models were trained and predict no better than the commonest label alone."""
    compared = {path for pair in findings(compared_pairs) for path in (pair.full, pair.other)}
    models, said = findings.measurements.models, []
    for _, row in models[models["model"].isin(compared) & (models["snapshot"] != "initialisation")].iterrows():
        task, samples = TASKS.get(str(row["task"])), int(row["samples"])
        if task is None or samples < _TELLING or pd.isna(row["accuracy"]):
            continue
        blind = max(task.chance, task.majority)
        if row["accuracy"] <= blind + 1.96 * math.sqrt(blind * (1 - blind) / samples):
            numbers = f"{row['accuracy']:.1%} of {samples:,} samples, the commonest label alone {blind:.1%}"
            said.append(f"{_short(row)} ({numbers})")
    if not said:
        return []
    who = f"{'neither' if len(said) == 2 else 'none'} of them has" if len(said) > 1 else "it has not"
    return [
        f"Not learned: {' and '.join(said)} predict{'s' * (len(said) == 1)} no better than chance: {who} learned "
        "the task on these inputs, so a comparison says nothing of what learning does."
    ]


def pairs_against(models: pd.DataFrame, against: str) -> list[Pair]:
    """Pair every model with one reference, whether or not they match."""
    reference = models[models["model"] == against].iloc[0]
    pairs = []
    for _, row in models[models["model"] != against].iterrows():
        label = f"{_short(row)} against {_short(reference)}"
        swap = row["attention"] == "full" and reference["attention"] != "full"
        ends = (row["model"], against) if swap else (against, row["model"])
        pairs.append(Pair(label, *ends))
    return _with_distinct_labels(pairs, [path for path in models["model"] if path != against])


def differences(models: pd.DataFrame, pair: Pair) -> list[str]:
    """Return the differences between the two models of a pair besides attention."""
    full, other = (models[models["model"] == path].iloc[0] for path in (pair.full, pair.other))
    both = full["attention"] != "full" and other["attention"] != "full"
    names = [*RUN_AND_SNAPSHOT, *(("k", "global_tokens") if both else ())]
    return [f"{name} {full[name]} and {other[name]}" for name in names if not _equal(full[name], other[name])]


def _equal(one: Any, two: Any) -> bool:
    if pd.isna(one) or pd.isna(two):
        return bool(pd.isna(one) and pd.isna(two))
    return bool(one == two)


def attention_word(row: Any) -> str:
    """Return a model's attention in one word: ``full``, ``topk-5``, ``banded-5-global-1``."""
    kind = str(row["attention"]) if pd.isna(row["k"]) else f"{row['attention']}-{row['k']}"
    return f"{kind}-global-{row['global_tokens']}" if row["global_tokens"] else kind


def path_tail(path: str, among: Collection[str], letters: int = 28) -> str:
    """Shorten a path to its end."""
    tail = path[-letters:]
    if len(path) <= letters or sum(other.endswith(tail) for other in set(among) | {path}) > 1:
        return path
    return f"…{tail}"


def _with_distinct_labels(pairs: list[Pair], compared: list[str]) -> list[Pair]:
    """Add the compared models' paths to labels that occur more than once."""
    labels = [pair.label for pair in pairs]
    return [
        pair
        if labels.count(pair.label) == 1
        else replace(pair, label=f"{pair.label}, {path_tail(path, compared)}")
        for pair, path in zip(pairs, compared, strict=True)
    ]


def _short(row: Any) -> str:
    return f"{row['task']}, {attention_word(row)}, seed {row['seed']}, {row['snapshot']}"
