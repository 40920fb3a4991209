"""What the measurements say, in sentences; the numbers come from the measurement layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from semdiag.capturing.attention_kinds import DENSE, FIXED_MASKS, external
from semdiag.findings.finding import Finding
from semdiag.findings.gate.pairs import GateResult, dispersion_gate
from semdiag.findings.pairing import find_pairs
from semdiag.findings.resampling import Interval, ratio_interval
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.percentiles import percentiles
from semdiag.presentation.drawing.panels import panels_of
from semdiag.presentation.sections.bounds.sentences import bounds_sentences, in_short, stability_sentences
from semdiag.presentation.sections.convergence.sentences import (
    along_sentences,
    convergence_sentences,
    length_sentences,
)
from semdiag.presentation.sections.learning.learning_speed import training_runs
from semdiag.presentation.sections.lipschitz.sentences import landscape_sentences, lipschitz_sentences
from semdiag.presentation.sections.mask_stability.sentences import mask_sentences, masks_in_short, sweep_sentences
from semdiag.presentation.sections.predictors.sentences import predictor_sentences
from semdiag.presentation.sections.within.sentences import capture_sentences, within_sentences

_RESAMPLES = 300
_NO_PAIR = (
    "Nothing is compared: there is no full and top-k model of the same task, seed, size and snapshot. "
    "The figures show each model by itself."
)
_WHEN = {"last": "", "initialisation": "At initialisation: ", "best": "Best snapshots: "}


@dataclass(frozen=True)
class PairVerdict:
    """One top-k model against its full counterpart.

    Attributes:
        gate: pooled percentiles of both, and whether δ_h < δ_s at p50, p75, p90 and p95.
        ratio: of the pooled medians, with a 95 % interval from resampled sequences.
        snapshot: which snapshots were compared.
    """

    gate: GateResult
    ratio: Interval
    snapshot: str

    @property
    def answer(self) -> str:
        """Whether δ_h < δ_s, in a word or two."""
        return "yes" if self.gate.passed else f"no at {', '.join(self.gate.failed)}"

    @property
    def sentence(self) -> str:
        """The comparison in a sentence."""
        full, topk, ratio = self.gate.full, self.gate.topk, self.ratio
        medians = (
            f"median δₕ {topk['p50']:.3g} against δₛ {full['p50']:.3g} nats, "
            f"ratio {ratio.estimate:.2f}, 95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
        )
        start = _WHEN.get(self.snapshot, f"Snapshot {self.snapshot}: ")
        start += self.gate.pair.label.removesuffix(f", {self.snapshot}")
        if self.gate.passed:
            where = "at the 50th, 75th, 90th and 95th percentile"
            return f"{start}: the top-k model has the smaller dispersion {where} ({medians})."
        failed = ", ".join(f"{p} (δₕ {topk[p]:.3g}, δₛ {full[p]:.3g})" for p in self.gate.failed)
        return f"{start}: δₕ is not below δₛ at {failed} ({medians})."

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values."""
        gate, ratio = self.gate, self.ratio
        return {
            "label": gate.pair.label,
            "snapshot": self.snapshot,
            "full": gate.pair.full,
            "topk": gate.pair.other,
            "dispersion_full": gate.full,
            "dispersion_topk": gate.topk,
            "passed": gate.passed,
            "failed": list(gate.failed),
            "median_ratio": {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high, "confidence": 0.95},
        }


def pair_verdicts(measurements: Measurements) -> list[PairVerdict]:
    """Compare every top-k model that has a full counterpart with it, last snapshots first.

    Args:
        measurements: of any number of models; those without a partner are left out.

    Returns:
        One verdict per pair.
    """
    pairs, _ = find_pairs(measurements.models)
    paired = {model for pair in pairs for model in (pair.full, pair.other)}
    if not paired:
        return []
    models = measurements.models[measurements.models["model"].isin(sorted(paired))]
    queries = {str(model): rows for model, rows in measurements.queries.groupby("model", sort=False)}
    snapshots = dict(zip(models["model"], models["snapshot"], strict=True))
    found = []
    for gate in dispersion_gate(replace(measurements, models=models)):
        ratio = ratio_interval(queries[gate.pair.other], queries[gate.pair.full], resamples=_RESAMPLES)
        found.append(PairVerdict(gate, ratio, snapshots[gate.pair.other]))
    return sorted(found, key=lambda verdict: verdict.snapshot != "last")


def sentences(
    measurements: Measurements,
    verdicts: list[PairVerdict],
    sections: Sequence[str],
    findings: Mapping[str, Sequence[Finding]] = MappingProxyType({}),
) -> list[str]:
    """Say in words what was found.

    Args:
        measurements: of any number of models.
        verdicts: from :func:`pair_verdicts`.
        sections: of the report.
        findings: of the theory, by section.

    Returns:
        What was found on dispersion, learning and separation, the theory in short, how much of the attention was
        captured, then warnings. Of models of others: what a sparse mask would leave of their attention.
    """
    if external(measurements.models).all():
        masks = masks_in_short(measurements) if "mask-stability" in sections else []
        said = within_sentences(measurements)
        return [*said, *in_short(findings), *masks, *capture_sentences(measurements), *_warnings(measurements)]
    said = []
    if "dispersion" in sections:
        said += [verdict.sentence for verdict in verdicts] or [_NO_PAIR]
        said += _controls(measurements)
    if "learning" in sections:
        said += _learning(measurements)
    if "separation" in sections:
        said += _separation(measurements)
    said += in_short(findings)
    if "mask-stability" in sections:
        said += masks_in_short(measurements)
    if "convergence" in sections:
        said += convergence_sentences(measurements)
    if "predictors" in sections:
        said += predictor_sentences(measurements)[:2]
    said = said or ["What was found stands below, model by model."]
    return [*said, *capture_sentences(measurements), *_warnings(measurements)]


def details(
    measurements: Measurements, sections: Sequence[str], findings: Mapping[str, Sequence[Finding]]
) -> dict[str, list[str]]:
    """Say model by model and pair by pair what became of the theory's claims.

    Args:
        measurements: of any number of models.
        sections: of the report.
        findings: of the theory, by section.

    Returns:
        Sentences by section, for all but the measurements that the short verdict covers.
    """
    say = {"stability": stability_sentences, "bounds": bounds_sentences}
    said = {name: say[name](measurements, findings.get(name, ())) for name in say if name in sections}
    if "mask-stability" in sections:
        said["mask-stability"] = mask_sentences(measurements)
    if "k-sweep" in sections:
        said["k-sweep"] = sweep_sentences(measurements)
    if "lipschitz" in sections:
        said["lipschitz"] = lipschitz_sentences(measurements, findings.get("lipschitz", ()))
    if "landscape" in sections:
        said["landscape"] = landscape_sentences(measurements)
    if "along" in sections:
        said["along"] = along_sentences(measurements)
    if "predictors" in sections:
        said["predictors"] = predictor_sentences(measurements)
    if "lengths" in sections:
        said["lengths"] = length_sentences(measurements)
    return said


def _controls(measurements: Measurements) -> list[str]:
    """What masks that ignore the input do to the pooled median, last snapshots only."""
    models = measurements.models[measurements.models["snapshot"] == "last"]
    pairs, _ = find_pairs(models[models["attention"].isin(FIXED_MASKS)], attention=None)
    medians = {str(m): percentiles(d)["p50"] for m, d in measurements.queries.groupby("model")["dispersion"]}
    parts = [
        f"{pair.label} {medians[pair.other] / medians[pair.full]:.2g} times"
        for pair in pairs
        if medians.get(pair.full, 0) > 0 and pair.other in medians
    ]
    if not parts:
        return []
    return [
        f"For comparison, masks that ignore the scores have a median δ of: {'; '.join(parts)} full attention's. "
        "A smaller range is in part only a range over fewer keys."
    ]


def _learning(measurements: Measurements) -> list[str]:
    said = []
    for panel, runs in training_runs(measurements):
        parts = [
            f"{run.series.label} after {run.arrival} epoch{'s' * (run.arrival != 1)}"
            if run.arrival
            else f"{run.series.label} not within its {run.epochs} epochs"
            for run in runs
        ]
        said.append(f"{panel.title}, 95 % training accuracy: {', '.join(parts)}.")
    return said or ["Nothing is known of the training: no model brings its history."]


def _separation(measurements: Measurements) -> list[str]:
    """Median and lower end of Δ of the top-k models; of all sparse ones if there is none."""
    models = measurements.models[~measurements.models["attention"].isin(DENSE)]
    models = models[models["snapshot"] == "last"] if (models["snapshot"] == "last").any() else models
    models = models[models["attention"] == "topk"] if (models["attention"] == "topk").any() else models
    said = []
    for panel in panels_of(models) if len(models) else []:
        for series in panel.series:
            queries = measurements.queries[measurements.queries["model"] == series.model]
            loads = measurements.loads[measurements.loads["model"] == series.model]
            table = percentiles(queries["separation"])
            said.append(
                f"{panel.title}, {series.label}: the separation Δ has the median {table['p50']:.2g} nats, 5 % of "
                f"the queries lie below {table['p5']:.2g}, and {table['not_positive']:,} of {table['queries']:,} "
                f"are not positive. The busiest key is kept by {percentiles(loads['load'])['p100']:g} queries."
            )
    return said or ["No model drops a key: separation is undefined for full attention."]


def _warnings(measurements: Measurements) -> list[str]:
    said = []
    if len(measurements.non_finite):
        count = int(measurements.non_finite["scores"].sum())
        said.append(f"Warning: {count:,} attention scores were NaN or infinite; see the last section.")
    return said
