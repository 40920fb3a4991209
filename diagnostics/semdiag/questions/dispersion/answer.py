"""Dispersion δ by layer and head, paired with full attention, and the initialisation it came from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from semdiag.capturing.attention_call import DENSE, FIXED_MASKS, external
from semdiag.measuring.findings.estimates import (
    Percentile,
    by_layer,
    in_part,
    known_rows,
    pooled_percentiles,
    require_every_query,
    without,
)
from semdiag.measuring.findings.findings import (
    Findings,
    Pair,
    Summary,
    attention_word,
    differences,
    find_pairs,
    rivals,
    seed_names,
)
from semdiag.measuring.findings.resampling import Interval, ratio_interval
from semdiag.measuring.words import count_of, counted, decimals, interval_words, span_words
from semdiag.presenting.answer import Answer, Claim, Glance, Outcome, percentile_csvs, sampled_word, top_words
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.drawing.style import attention_style, reference_words
from semdiag.questions.dispersion.measure import INITIALISATION
from semdiag.questions.percentile_tables import percentile_tables
from semdiag_files import InputError

GATED = ("p50", "p75", "p90", "p95")
NO_NUMBER = "because a δ there is not a number"
SHOWN = (*GATED, "p100")  # p100 is a single query: printed, not gated


@dataclass(frozen=True)
class GateResult:
    """The dispersions of one pair, pooled at percentiles or at the median of each layer."""

    pair: Pair  # full model and top-k model
    full: dict[Any, float]  # δ_s of the full model by percentile, or by layer (nats)
    topk: dict[Any, float]  # δ_h of the top-k model likewise
    judged: tuple[Any, ...] = GATED  # percentiles or layers at which δ_h < δ_s must hold
    allowed: int = 0  # number of these at which it may fail

    @property
    def failed(self) -> tuple[Any, ...]:
        """Return where δ_h < δ_s does not hold or is unknown."""
        return tuple(place for place in self.judged if not self.topk[place] < self.full[place])

    @property
    def passed(self) -> bool:
        """Return whether δ_h < δ_s holds nearly everywhere."""
        return len(self.failed) <= self.allowed

    @property
    def unknown(self) -> tuple[Any, ...]:
        """Return where it fails because a δ is not a number."""
        return tuple(place for place in self.failed if math.isnan(self.full[place] + self.topk[place]))

    @property
    def fault(self) -> str:
        """Return in words where it fails; empty if nowhere."""
        parts = []
        if failed := [place for place in self.failed if place not in self.unknown]:
            parts.append(f"δ_h < δ_s fails at {self._places(failed)}")
        if self.unknown:
            parts.append(f"δ_h < δ_s cannot be judged at {self._places(self.unknown)}, {NO_NUMBER}")
        return "; ".join(parts)

    def _places(self, places: Sequence[Any]) -> str:
        words = ", ".join(map(str, places))
        if self.judged == GATED:
            return words
        return f"the median of {len(places)} of {counted(len(self.judged), 'layer')} ({words})"


def dispersion_gate(findings: Findings) -> list[GateResult]:
    """Compare pooled dispersions of paired full and top-k models; every model must have one partner."""
    models = findings.measurements.models
    pairs, alone = find_pairs(models)
    for pair in pairs:
        if rival := next(iter(rivals(models, pair)), None):
            raise InputError(
                f"{pair.full} and {rival} could both be the partner of {pair.counterpart}, and differ: name one."
            )
    if alone:
        raise InputError(
            f"{alone[0]} has no partner: a full and a top-k checkpoint of the same task, seed, size, setting and "
            f"snapshot are needed{_nearest(models, alone[0])}. Train the other one with semdiag train, and the "
            "options of this one, which semdiag info shows."
        )
    if not pairs:
        raise InputError(
            "There is no full or top-k checkpoint to pair. Train both with: semdiag train even-pairs, and: "
            "semdiag train even-pairs --attention topk --k 5."
        )
    return gate_results(findings, pairs)


def gate_results(findings: Findings, pairs: Sequence[Pair]) -> list[GateResult]:
    """Return the pooled dispersions of pairs."""
    require_every_query(findings, "The gate")
    tables = findings(pooled_percentiles, "dispersion")
    sides = (
        [{p: float(tables[model][p]) for p in SHOWN} for model in (pair.full, pair.counterpart)] for pair in pairs
    )
    return [GateResult(pair, full, topk) for pair, (full, topk) in zip(pairs, sides, strict=True)]


def _nearest(models: pd.DataFrame, model: str) -> str:
    """In what the model differs from the one that comes nearest to being its partner; nothing if none does."""
    row = models[models["model"] == model].iloc[0]
    partner = "topk" if row["attention"] == "full" else "full"
    candidates = models[(models["attention"] == partner) & (models["task"] == row["task"])]["model"]
    differing = [(differences(models, Pair("", model, path)), path) for path in candidates]
    if not differing:
        return ""
    least, nearest = min(differing, key=lambda entry: len(entry[0]))
    return f" ({nearest} differs from it in {'; '.join(least)})"


_WHEN = {"last": "", "initialisation": "At initialisation: ", "best": "Best snapshots: "}


def dispersion_results(findings: Findings) -> dict[str, Summary]:
    """Return percentiles of δ, and of δ_h(k) and the weight kept where measured, by layer and head and pooled."""
    queries = findings.measurements.queries

    def describe(of: Percentile, suffix: str) -> Summary:
        numbers = without(of("dispersion" + suffix), "not_positive")
        if suffix and "weight_kept" + suffix in queries:
            numbers["weight_kept"] = without(of("weight_kept" + suffix), "not_positive")
        if not suffix and "recall" in queries and of("recall")["queries"] > of("recall")["undefined"]:
            undefined = numbers["undefined"] / max(1, numbers["queries"])  # of a query that keeps no key
            numbers |= {"recall": of("recall")["mean"], "without_keys": undefined}
        return numbers

    return by_layer(findings, describe)


@dataclass(frozen=True)
class PairComparison:
    """A top-k model beside its full counterpart."""

    gate: GateResult  # pooled percentiles of both, and whether δ_h < δ_s at p50, p75, p90 and p95
    ratio: Interval  # quotient of the pooled medians, with a 95% interval from resampled sequences
    snapshot: str  # name of the snapshots compared
    samples: int  # sequences behind the ratio, of the model with fewer

    @property
    def answer(self) -> str:
        """Return whether δ_h < δ_s, in a word or two."""
        if self.gate.unknown:
            return "inconclusive"
        return "yes" if self.gate.passed else f"no at {', '.join(self.gate.failed)}"

    @property
    def sentence(self) -> str:
        """Return the comparison in a sentence."""
        full = self.gate.full
        topk = self.gate.topk
        ratio = self.ratio
        pair = _WHEN.get(self.snapshot, f"Snapshot {self.snapshot}: ")
        pair += self.gate.pair.label.removesuffix(f", {self.snapshot}")
        if self.gate.unknown:
            return f"{pair}: it is unclear which model has the smaller dispersion, because a δ is not a number."
        alike = ratio.low < ratio.high and round(ratio.low, 2) == round(ratio.high, 2)
        ratio_text = partial(decimals, places=3 if alike else 2)  # tells the ends of the interval apart
        medians = f"median δₕ {topk['p50']:.3g} against δₛ {full['p50']:.3g} nats"
        if math.isfinite(ratio.estimate):
            interval = interval_words(ratio.low, ratio.high, ratio_text, self.samples)
            medians += f", ratio {ratio_text(ratio.estimate)}, {interval}"
        if self.gate.passed:
            where = "at the 50th, 75th, 90th and 95th percentile"
            return f"{pair}: the top-k model has the smaller dispersion {where} ({medians})."
        failed = ", ".join(f"{p} (δₕ {topk[p]:.3g}, δₛ {full[p]:.3g})" for p in self.gate.failed)
        return f"{pair}: δₕ is not below δₛ at {failed} ({medians})."

    @property
    def claim(self) -> Claim:
        """Return the comparison as a claim on the ratio of its medians."""
        verdict = Outcome.HOLDS if self.gate.passed else Outcome.DOES_NOT
        if self.gate.unknown:
            verdict = Outcome.OPEN
        ratio = self.ratio
        interval = (ratio.low, ratio.high)
        return Claim("pair", self.sentence, self.gate.pair.label, ratio.estimate, "ratio", interval, verdict)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        gate = self.gate
        ratio = self.ratio
        return {
            "label": gate.pair.label, "snapshot": self.snapshot, "full": gate.pair.full,
            "topk": gate.pair.counterpart, "dispersion_full": gate.full, "dispersion_topk": gate.topk,
            "passed": gate.passed, "failed": list(gate.failed), "unknown": list(gate.unknown),
            "median_ratio": {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high, "confidence": 0.95},
        }  # fmt: skip


def pair_comparisons(findings: Findings) -> list[PairComparison]:
    """Compare every top-k model that has a full counterpart with it, last snapshots first."""
    measurements = findings.measurements
    pairs, _ = find_pairs(measurements.models)
    if in_part(findings):
        return []
    snapshots = dict(zip(measurements.models["model"], measurements.models["snapshot"], strict=True))
    comparisons = []
    for gate in gate_results(findings, pairs):
        sparse_rows, full_rows = (
            known_rows(findings, m, "dispersion") for m in (gate.pair.counterpart, gate.pair.full)
        )
        ratio = ratio_interval(sparse_rows, full_rows, resamples=RESAMPLES)
        samples = min(sparse_rows["sample"].nunique(), full_rows["sample"].nunique())
        comparisons.append(PairComparison(gate, ratio, snapshots[gate.pair.counterpart], samples))
    return sorted(comparisons, key=lambda comparison: comparison.snapshot != "last")


RATIO_PERCENTILES = (50, 95)
RESAMPLES = 300  # of whole sequences: the ends of a 95% interval are then known to about a tenth of its width


def layer_ratios(findings: Findings, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Return the ratios of dispersion between every sparse model and its full counterpart, by layer."""
    layers = findings.measurements.queries.groupby("model")["layer"].unique()
    ratios = []
    for pair in find_pairs(findings.measurements.models, attention=None)[0]:
        common = sorted({*layers[pair.counterpart]} & {*layers[pair.full]})
        for percentile, layer in product(RATIO_PERCENTILES, map(int, common)):
            sparse_rows, full_rows = (
                findings(known_rows, model, "dispersion", layer) for model in (pair.counterpart, pair.full)
            )
            interval = ratio_interval(sparse_rows, full_rows, percentile=percentile, resamples=resamples)
            numbers = (interval.estimate, interval.low, interval.high)
            ratios.append((pair.counterpart, pair.full, percentile, layer, *numbers))
    return pd.DataFrame(ratios, columns=["model", "full", "percentile", "layer", "ratio", "low", "high"])


def fixed_mask_ratios(findings: Findings) -> list[tuple[Pair, float]]:
    """Return pooled median δ under input-agnostic masks (controls) over full attention's; last snapshots only."""
    models = findings.measurements.models[findings.measurements.models["snapshot"] == "last"]
    seeds = seed_names(findings.measurements.models)
    pairs, _ = find_pairs(models[models["attention"].isin(FIXED_MASKS)], attention=None, seeds=seeds)
    medians = {model: table["p50"] for model, table in findings(pooled_percentiles, "dispersion").items()}
    return [
        (pair, medians[pair.counterpart] / medians[pair.full])
        for pair in pairs
        if medians.get(pair.full, 0) > 0 and medians.get(pair.counterpart, math.nan) >= 0
    ]


def dispersion_glance(findings: Findings) -> Glance:
    """Return in how many pairs the top-k model has the smaller dispersion; without pairs, the dispersion."""
    compared = findings(pair_comparisons)
    trained = [pair for pair in compared if pair.snapshot != "initialisation"]
    last = [pair for pair in trained if pair.snapshot == "last"]
    pairs = last or trained or compared
    return _pairs_glance(findings, pairs, bool(trained)) if pairs else _span_glance(findings)


def _pairs_glance(findings: Findings, pairs: Sequence[PairComparison], trained: bool) -> Glance:
    judged = [pair for pair in pairs if not pair.gate.unknown]
    if not judged:
        words = "of a full and a top-k model have a finite dispersion δ on both sides"
        return Glance(Outcome.OPEN, count_of(0, len(pairs), "pair"), words, of_paper=True)
    passed = sum(pair.gate.passed for pair in judged)
    outcome = Outcome.HOLDS if passed == len(judged) else Outcome.DOES_NOT
    words = (
        f"in which the {top_words(findings)} model has the smaller dispersion δ at the 50th, 75th, 90th "
        "and 95th percentile"
    )
    notes = []
    if ratios := [pair.ratio.estimate for pair in judged if np.isfinite(pair.ratio.estimate)]:
        notes.append(f"ratio of the medians {span_words(ratios, decimals)}")
    if trained and (before := ratio_before(findings)):
        notes.append(f"before training {before}")
    if notes:
        words += f" ({'; '.join(notes)})"
    if not trained:
        outcome = Outcome.OPEN
        words += "; they are not trained yet"
    if len(judged) < len(pairs):
        words += f"; {len(pairs) - len(judged)} more cannot be judged"
    return Glance(outcome, count_of(passed, len(judged), "pair"), words, of_paper=True)


def _span_glance(findings: Findings) -> Glance:
    """Return the median dispersion of models of which none is paired."""
    tables = findings(pooled_percentiles, "dispersion").values()
    finite = [table for table in tables if np.isfinite(table["p50"])]
    if not finite:
        return Glance(Outcome.OPEN, f"0 of {counted(len(tables), 'model')}", "have a finite dispersion δ")
    queries = counted(sum(int(table["queries"]) for table in finite), "query")
    span = span_words([table["p50"] for table in finite], "{:.3g}")
    words = f"is the median dispersion δ of {counted(len(finite), 'model')} ({queries}{sampled_word(findings)})"
    if len(finite) < len(tables):
        words += f"; for {len(tables) - len(finite)} more it is not a number"
    models = findings.measurements.models
    claim_id = SPAN if len(models) == 1 else ""
    if external(models).all():
        words += (
            f"; in other trained models 90% of the heads have {reference_words('dispersion', models['model'])}"
        )
        return Glance(Outcome.MEASURED, f"{span} nats", words, claim_id=claim_id)
    why = "no pair of a full and a top-k model to compare"
    if in_part(findings):
        why = "only some queries were drawn or kept, but a verdict on pairs needs all of them"
    return Glance(Outcome.OPEN, f"{span} nats", f"{words}; {why}", claim_id=claim_id)


def before_training(findings: Findings) -> list[float]:
    """Return for each trained pair the ratio of the median δ at the initialisations, where both are known."""
    table = findings.measurements[INITIALISATION]
    medians = dict(zip(table["model"], table["dispersion"], strict=True))
    compared = findings(pair_comparisons)
    untrained = [pair.ratio.estimate for pair in compared if pair.snapshot == "initialisation"]
    pairs = [pair.gate.pair for pair in compared if pair.snapshot == "last"]
    ratios = [
        medians[pair.counterpart] / medians[pair.full]
        for pair in pairs
        if {pair.full, pair.counterpart} <= set(medians)
    ]
    return [ratio for ratio in untrained or ratios if np.isfinite(ratio) and ratio > 0]


def ratio_before(findings: Findings) -> str:
    """Return the range of the ratios before training in words; empty if none is known."""
    ratios = before_training(findings)
    return span_words(ratios, decimals) if ratios else ""


_NO_PAIR = (
    "Nothing is compared: there is no pair of a full and a top-k model of the same task, seed, size, setting and "
    "snapshot."
)
_NOT_JUDGED = "Pairs of models are not judged: a verdict needs every query, but only some were drawn or kept."


SPAN = "span"  # the claim about a model that is compared with no other


def dispersion_claims(findings: Findings) -> list[Claim]:
    """Return claims on δ_h < δ_s by pair, and on fixed masks; for external models, on each by itself."""
    models = findings.measurements.models
    if external(models).all():
        return [span_claim(findings, model) for model in models["model"]]
    claims = [comparison.claim for comparison in findings(pair_comparisons)]
    if not claims:
        claims = [span_claim(findings, model, label) for model, label in model_labels(models).items()]
        if len(claims) > 1:
            claims.append(Claim("not-compared", _NOT_JUDGED if in_part(findings) else _NO_PAIR))
    if ratios := [f"{pair.label} {ratio:.2g} times" for pair, ratio in findings(fixed_mask_ratios)]:
        fixed_masks = (
            f"For comparison, masks that ignore the scores have a median δ of: {'; '.join(ratios)} full "
            "attention's. A smaller range is in part only a range over fewer keys."
        )
        claims.append(Claim("fixed-masks", fixed_masks))
    return [*_ratio_claims(findings), *claims, *_layer_claims(findings), *_recall_claims(findings)]


def _layer_claims(findings: Findings) -> list[Claim]:
    """Return in how many layers the median is surely below full attention's, by kind; last snapshots only."""
    if in_part(findings):
        return []
    models = findings.measurements.models.set_index("model")
    ratios = findings(layer_ratios)
    ratios = ratios[(ratios["percentile"] == 50) & ratios["ratio"].notna()]
    ratios = ratios[ratios["model"].map(models["snapshot"]) == "last"]
    ratios = ratios.assign(
        kind=ratios["model"].map(models["attention"]), below=ratios["high"].fillna(ratios["ratio"]) < 1
    )
    counts = [
        f"{rows['below'].sum()} of {counted(len(rows), 'layer')} with {attention_style(str(kind)).name}"
        for kind, rows in ratios.groupby("kind", sort=False)
    ]
    if not counts:
        return []
    words = f"Layer by layer the median δ is below full attention's in {', '.join(counts)} (95% intervals)."
    return [Claim("layers", words, value=float(ratios["below"].sum()), unit="layers")]


def _ratio_claims(findings: Findings) -> list[Claim]:
    """Return the claim on the ratio of the medians after and before training; none without finite ratios."""
    pairs = [pair for pair in findings(pair_comparisons) if pair.snapshot == "last" and not pair.gate.unknown]
    ratios = [pair.ratio.estimate for pair in pairs]
    if not ratios or not all(math.isfinite(ratio) and ratio > 0 for ratio in ratios):
        return []
    passed = sum(pair.gate.passed for pair in pairs)
    words = f"The median dispersion δ of top-k attention is {span_words(ratios, decimals)} of full attention's"
    words += f" ({count_of(passed, len(pairs), 'pair')} smaller at p50, p75, p90 and p95)"
    before = before_training(findings)
    if len(before) == len(ratios):
        words += f"; before training it is {ratio_before(findings)}{_mask_share_words(before, ratios)}."
    else:
        words += ". How much of that the mask alone does is not known: no initialisation was measured."
    verdict = Outcome.HOLDS if passed == len(pairs) else Outcome.DOES_NOT
    return [Claim("ratio", words, value=float(np.median(ratios)), unit="ratio", verdict=verdict)]


def _mask_share_words(before: Sequence[float], after: Sequence[float]) -> str:
    """Return whether the mask alone, or training, makes most of the ratios, on a logarithmic scale."""
    shares = [
        math.log(start) / math.log(end) if end < 1 else math.nan for start, end in zip(before, after, strict=True)
    ]
    if all(share >= 0.5 for share in shares):
        return ": the mask alone does most of it"
    return ": most of it was learned" if all(share < 0.5 for share in shares) else ""


def _recall_claims(findings: Findings) -> list[Claim]:
    claims = []
    seeds = seed_names(findings.measurements.models)
    keys = findings.measurements.queries.groupby("model")["keys"].max()
    for row in findings.measurements.models.to_dict("records"):
        result = findings(dispersion_results)[row["model"]]
        pooled = result["all"]
        heads = [head["recall"] for head in result["layers"] if "recall" in head]
        if heads:
            sentence = (
                f"{row['task']}, {attention_word(row)}, seed {seeds.get(row['seed'], row['seed'])}: the keys that "
                "a query keeps hold "
                f"{pooled['recall']:.0%} of its {row['k']} largest scores ({min(heads):.0%} to {max(heads):.0%} "
                f"by head; {counted(row['k'], 'key')} at random would hold "
                f"{min(1.0, row['k'] / keys[row['model']]):.0%}), and {pooled['without_keys']:.1%} of "
                f"{counted(pooled['queries'], 'query')} keep no key."
            )
            claims.append(Claim("recall", sentence, row["model"], pooled["recall"], "share"))
    return claims


def span_claim(findings: Findings, model: str, label: str = "") -> Claim:
    """Return the claim on the dispersion of a model that is compared with no other."""
    label = label or model
    delta = findings(pooled_percentiles, "dispersion")[model]
    if math.isnan(delta["p50"]):
        return Claim(SPAN, f"{label}: its dispersion is not a number.", model)
    keys = "the keys that it keeps"
    if findings.measurements.models.set_index("model").loc[model, "attention"] in DENSE:
        median = findings(pooled_percentiles, "keys")[model]["p50"]
        keys = f"{median:g} {'key' if median == 1 else 'keys'} at the median"
    sentence = (
        f"{label}: the scores of a query span {delta['p50']:.3g} nats at the median and "
        f"{delta['p95']:.3g} at the 95th percentile, over {keys}."
    )
    return Claim(SPAN, sentence, model, delta["p50"], "nats")


def answer(findings: Findings) -> Answer:
    """Return how far apart the scores of a query are, and whether top-k attention has the smaller range."""
    results = findings(dispersion_results)
    tables = percentile_csvs(findings, "dispersion")
    if not external(findings.measurements.models).all():
        tables["dispersion_ratio"] = findings(layer_ratios)
    return Answer(
        dispersion_glance(findings),
        dispersion_claims(findings),
        tables=tables,
        results=results,
        shown=percentile_tables(findings, "dispersion", results),
    )
