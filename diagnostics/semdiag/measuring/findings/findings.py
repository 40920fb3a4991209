"""Findings, and what all of them use: comparable pairs of models, JSON, numbers in words, and verdicts."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from string import ascii_uppercase
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import pandas as pd

from semdiag.capturing.attention_call import external
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted
from semdiag_models import TASKS

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


class Findings:
    """Measurements, and the answers that they give to questions.

    An answer is a function of findings, like ``mask_table`` of the question mask stability, and may use others.
    Terminal, page, figures, CSV and JSON share one object, so that they agree, and slow answers are computed once.

    Example:
        >>> nothing = pd.DataFrame({"model": []})
        >>> findings = Findings(Measurements(nothing, nothing, nothing, nothing, nothing))
        >>> findings(lambda findings: len(findings.measurements.models))
        0
    """

    def __init__(self, measurements: Measurements) -> None:
        self.measurements = measurements
        self._answers: dict[Any, Any] = {}

    def __call__(
        self,
        question: "Callable[Concatenate[Findings, Parameters], Answer]",
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Answer:
        """Return the answer of a function of findings and of hashable arguments; it is shared: never change it."""
        key = question, args, *sorted(kwargs.items())
        if key not in self._answers:
            self._answers[key] = question(self, *args, **kwargs)
        return cast("Answer", self._answers[key])


# Models that differ in one of these are never compared or drawn on the same axes.
RUN = ("task", "seed", "blocks", "heads", "width", "length", "norm", "pooling", "setting")
_LONG_SEED = 6  # digits, from which on a letter is read more easily
_TELLING = 50  # samples; fewer do not distinguish chance from 60%
RUN_AND_SNAPSHOT = (*RUN, "snapshot")


@dataclass(frozen=True)
class Pair:
    """A full-attention model and a counterpart that differs from it only in its attention."""

    label: str  # task, attention and seed in words
    full: str  # path of the full model
    counterpart: str  # its path


def seed_names(models: pd.DataFrame) -> dict[Any, str]:
    """Return what the seeds of models are called: several long ones by letters, else by themselves."""
    seeds = sorted(set(models["seed"].dropna().astype(int)))
    long = min(map(len, map(str, seeds)), default=0) >= _LONG_SEED
    if not long or not 1 < len(seeds) <= len(ascii_uppercase):
        return {seed: str(seed) for seed in seeds}
    return dict(zip(seeds, ascii_uppercase, strict=False))


def seed_sentence(models: pd.DataFrame) -> str:
    """Return which seed each letter stands for; empty if seeds are called by themselves."""
    named = [f"{name} is {seed}" for seed, name in seed_names(models).items() if name != str(seed)]
    return f"Seed {', '.join(named)}." if named else ""


def _seed_word(seed: Any, names: Mapping[Any, str]) -> str:
    return names.get(seed, str(seed)) if pd.notna(seed) else str(seed)


def find_pairs(
    models: pd.DataFrame, attention: str | None = "topk", seeds: Mapping[Any, str] | None = None
) -> tuple[list[Pair], list[str]]:
    """Pair every model of one attention kind with the full-attention model trained on the same data.

    ``seeds``: what seeds are called, where the models are some of those that were measured.
    """
    seeds = seed_names(models) if seeds is None else seeds
    pairs = []
    unpaired = []
    models = models[~external(models)]  # their training is unknown
    sparse = models["attention"] != "full" if attention is None else models["attention"] == attention
    candidates = models[sparse | (models["attention"] == "full")]
    for _, group in candidates.groupby([*RUN_AND_SNAPSHOT], dropna=False, sort=False):
        full = group[group["attention"] == "full"]["model"].tolist()
        counterparts = group[group["attention"] != "full"]
        if not full or counterparts.empty:
            unpaired += group["model"].tolist()
            continue
        for _, row in counterparts.iterrows():
            label = f"{row['task']}, {attention_word(row)}, seed {_seed_word(row['seed'], seeds)}"
            if row["snapshot"] != "last":
                label += f", {row['snapshot']}"
            pairs.append(Pair(label, full[0], row["model"]))
    return _with_distinct_labels(pairs, [pair.counterpart for pair in pairs]), unpaired


def rivals(models: pd.DataFrame, pair: Pair) -> list[str]:
    """Return other models that could be the full model of a pair."""
    full = models[models["attention"] == "full"]
    chosen = full[full["model"] == pair.full].iloc[0]
    is_alike = [all(_equal(row[name], chosen[name]) for name in RUN_AND_SNAPSHOT) for _, row in full.iterrows()]
    alike = full[is_alike]
    return [str(path) for path in alike[alike["weights_sha256"] != chosen["weights_sha256"]]["model"]]


def compared_pairs(findings: Findings) -> list[Pair]:
    """Return the pairs that a report compares: with the model of --against, or full models with counterparts."""
    models = findings.measurements.models
    against = findings.measurements.provenance.get("against")
    if against is not None and against in set(models["model"]):
        return pairs_against(models, against)
    return find_pairs(models, attention=None, seeds={})[0]  # tables hold the seeds themselves, no letters


def unlearned_sentences(findings: Findings) -> list[str]:
    """Return a warning if compared models were trained and predict no better than the commonest label alone."""
    compared = {path for pair in findings(compared_pairs) for path in (pair.full, pair.counterpart)}
    models = findings.measurements.models
    unlearned = []
    seeds = seed_names(models)
    for _, row in models[models["model"].isin(compared) & (models["snapshot"] != "initialisation")].iterrows():
        task = TASKS.get(str(row["task"]))
        samples = int(row["samples"])
        if task is None or samples < _TELLING or pd.isna(row["accuracy"]):
            continue
        blind = max(task.chance, task.majority)
        if row["accuracy"] <= blind + 1.96 * math.sqrt(blind * (1 - blind) / samples):
            correct = f"{row['accuracy']:.1%} of {counted(samples, 'sample')}"
            unlearned.append(f"{_short(row, seeds)} ({correct}, the commonest label alone {blind:.1%})")
    if not unlearned:
        return []
    if len(unlearned) == 1:
        judgement = "predicts no better than chance: it has not learned"
    elif len(unlearned) == 2:
        judgement = "predict no better than chance: neither of them has learned"
    else:
        judgement = "predict no better than chance: none of them has learned"
    return [
        f"Not learned: {' and '.join(unlearned)} {judgement} the task on these inputs, so a comparison says "
        "nothing of what learning does."
    ]


def pairs_against(models: pd.DataFrame, against: str) -> list[Pair]:
    """Pair every model with one reference, whether or not they match."""
    reference = models[models["model"] == against].iloc[0]
    seeds = seed_names(models)
    pairs = []
    for _, row in models[models["model"] != against].iterrows():
        label = f"{_short(row, seeds)} against {_short(reference, seeds)}"
        swap = row["attention"] == "full" and reference["attention"] != "full"
        ends = (row["model"], against) if swap else (against, row["model"])
        pairs.append(Pair(label, *ends))
    return _with_distinct_labels(pairs, [path for path in models["model"] if path != against])


def differences(models: pd.DataFrame, pair: Pair) -> list[str]:
    """Return the differences between the two models of a pair besides attention."""
    full, counterpart = (models[models["model"] == path].iloc[0] for path in (pair.full, pair.counterpart))
    both_sparse = "full" not in (full["attention"], counterpart["attention"])
    names = [*RUN_AND_SNAPSHOT, *(("k", "global_tokens") if both_sparse else ())]
    return [
        f"{name} {full[name]} and {counterpart[name]}"
        for name in names
        if not _equal(full[name], counterpart[name])
    ]


def _equal(first: Any, second: Any) -> bool:
    if pd.isna(first) or pd.isna(second):
        return bool(pd.isna(first) and pd.isna(second))
    return bool(first == second)


def attention_word(row: Any) -> str:
    """Return a model's attention in one word: ``full``, ``topk-5``, ``banded-5-global-1``."""
    kind = str(row["attention"]) if pd.isna(row["k"]) else f"{row['attention']}-{row['k']}"
    return f"{kind}-global-{row['global_tokens']}" if row["global_tokens"] else kind


def path_tail(path: str, among: Collection[str], letters: int = 28) -> str:
    """Return the end of a path, long enough to distinguish it."""
    tail = path[-letters:]
    same_end = [each for each in {*among, path} if each.endswith(tail)]
    if len(path) <= letters or len(same_end) > 1:
        return path
    return f"…{tail}"


def _with_distinct_labels(pairs: list[Pair], compared: list[str]) -> list[Pair]:
    labels = [pair.label for pair in pairs]
    distinct = []
    for pair, path in zip(pairs, compared, strict=True):
        if labels.count(pair.label) > 1:
            pair = replace(pair, label=f"{pair.label}, {path_tail(path, compared)}")
        distinct.append(pair)
    return distinct


def _short(row: Any, seeds: Mapping[Any, str]) -> str:
    return f"{row['task']}, {attention_word(row)}, seed {_seed_word(row['seed'], seeds)}, {row['snapshot']}"


Summary = dict[str, Any]
MODEL_FACTS = ("model", "sha256", "task", "attention", "k", "epoch")  # facts in every entry of results


def json_ready(value: Any) -> Any:
    """Replace what JSON cannot represent, at any depth: NaN by None, infinities by the texts "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    return None if value is pd.NA else value


def schema(command: str) -> str:
    """Return name and version of a command's schema."""
    return f"semdiag.{command}/2"


def has_schema(content: Any, command: str) -> bool:
    """Return whether a command wrote the content, in this version or the one before."""
    return isinstance(content, dict) and content.get("schema") in (schema(command), f"semdiag.{command}/1")


def json_object(command: str, findings: Findings, **content: Any) -> Summary:
    """Return the object that a command prints."""
    facts = {"schema": schema(command), "provenance": findings.measurements.provenance}
    return Summary(json_ready({**facts, **content}))


def records(table: pd.DataFrame) -> list[Summary]:
    """Return the rows of a table as dictionaries."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


class Verdict(StrEnum):
    """Verdict of the measurements on a claim."""

    HOLDS = "holds"
    VIOLATED = "violated"
    VACUOUS = "vacuous"  # true of every row, whatever the model: means nothing
    NOT_MET = "assumption not met"
    NOTHING = "inconclusive"


@dataclass(frozen=True)
class Finding:
    """One claim and its verdict."""

    subject: str  # path of a model, or label of a pair
    claim: str  # claim in words
    form: str  # ``sound`` or ``paper``; empty if the claim has only one
    where: str  # ``all``, a percentile (``p95``), a layer (``layer 2``) or a tensor's name
    verdict: Verdict
    numbers: Mapping[str, float] = field(default_factory=dict)  # deciding numbers, by name
    note: str = ""  # further remark for readers; may be empty
    percentile: int | None = None  # percentile at which the claim was judged; None if there is none


def of_rows(holds: int, violated: int, vacuous: int, not_met: int) -> Verdict:
    """Return the verdict on a claim about many rows: violated if any row violates it, else that of most rows."""
    if violated:
        return Verdict.VIOLATED
    counts = {Verdict.HOLDS: holds, Verdict.VACUOUS: vacuous, Verdict.NOT_MET: not_met}
    return max(counts, key=lambda word: counts[word]) if any(counts.values()) else Verdict.NOTHING


def agreed(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the common verdict; inconclusive if they differ or there are none."""
    words = set(verdicts)
    return words.pop() if len(words) == 1 else Verdict.NOTHING


def log10(natural: float) -> float:
    """Return the decimal logarithm from a natural one."""
    return natural / math.log(10)


def verdicts_of(judged: Iterable[Finding], subject: str) -> list[dict[str, Any]]:
    """Return the findings about a model or pair as plain values."""
    return [
        {name: getattr(f, name) for name in ("claim", "form", "where", "note")}
        | {"verdict": f.verdict.value, "numbers": {name: float(value) for name, value in f.numbers.items()}}
        for f in judged
        if f.subject == subject
    ]


BLIND = 0.25  # fraction of the largest output: missing terms go unnoticed if rounding can change it by so much
_OFF = 0.1  # a change of this fraction by rounding is as large as a missing term


class Completeness(StrEnum):
    """The verdict on the residuals of a model."""

    COMPLETE = "recomputed within rounding"
    MISSING = "something is missing"
    BLIND = "inconclusive at this precision"
    UNKNOWN = "unknown"


def modules_by_layer(findings: Findings, model: str) -> list[str]:
    """Return the names of a model's attention modules in the order of its layers."""
    calls = findings.measurements.calls
    return calls[calls["model"] == model].sort_values("layer")["module"].astype(str).tolist()


def completeness(row: Mapping[str, Any]) -> Completeness:
    """Judge whether attention recomputed from the capture agrees with the model's."""
    residual = float(row["residual"])
    excess = float(row["residual_over_rounding"])
    if math.isnan(residual):
        return Completeness.UNKNOWN
    if excess > 1:
        return Completeness.MISSING
    return Completeness.BLIND if row["rounding"] > BLIND or residual > _OFF else Completeness.COMPLETE


Place = tuple[int, int]  # layer and head


def broken_places(findings: Findings, model: str) -> set[Place]:
    """Return the layers and heads of a model with scores that are not finite, and the pools that include them."""
    non_finite = findings.measurements.non_finite
    places = {(int(row["layer"]), int(row["head"])) for row in records(non_finite[non_finite["model"] == model])}
    return places | {(layer, ALL) for layer, _ in places} | ({(ALL, ALL)} if places else set())


def diverged(findings: Findings, model: str) -> bool:
    """Return whether some scores of a model are not finite, so that nothing can be said of its pooled queries."""
    return bool(broken_places(findings, model))
