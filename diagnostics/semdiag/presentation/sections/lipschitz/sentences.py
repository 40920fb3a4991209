"""What moving the parameters showed, in sentences; the numbers come from the measurement layer."""

import math
from collections.abc import Sequence

from semdiag.findings.finding import Finding, Verdict
from semdiag.findings.landscape import landscape_facts
from semdiag.findings.lipschitz import ORDERING
from semdiag.findings.pairing import compared_pairs
from semdiag.measurement.measurements import Measurements
from semdiag.presentation.drawing.panels import panels_of


def model_labels(measurements: Measurements) -> dict[str, str]:
    """Each model in words, like ``even-pairs, top-k (k = 5)``.

    Args:
        measurements: of any number of models.
    """
    return {s.model: f"{panel.title}, {s.label}" for panel in panels_of(measurements.models) for s in panel.series}


def lipschitz_sentences(measurements: Measurements, findings: Sequence[Finding]) -> list[str]:
    """Say whether every estimate stays below its bound, and whether top-k has the smaller ones.

    Args:
        measurements: with the tables of lipschitz.
        findings: of the section lipschitz.

    Returns:
        One sentence per pair, then per model.
    """
    said = []
    for pair in compared_pairs(measurements):
        own = [f for f in findings if f.subject == pair.label and f.claim == ORDERING]
        said += [f"{pair.label}: {_ordering(own)}"] if own else []
    for model, label in model_labels(measurements).items():
        own = [f for f in findings if f.subject == model]
        said += [f"{label}: {_below_bounds(own)}"] if own else []
    return said or ["Nothing is known of the steepness of these models' loss."]


def _ordering(own: Sequence[Finding]) -> str:
    """Where the loss around the counterpart is less steep, percentile by percentile."""
    answers = {Verdict.HOLDS: "is there", Verdict.VIOLATED: "is reversed"}
    start = "the paper's ordering (secants smaller than around full attention)"
    words = {f.verdict for f in own}
    verdict = answers.get(own[0].verdict, "is mixed") if len(words) == 1 else "is mixed"
    parts = [
        f"{f.where} smaller at {f.numbers['lower']:.0f}, larger at {f.numbers['higher']:.0f} of "
        f"{f.numbers['radii']:.0f} radii (ratio {f.numbers['smallest ratio']:.2g} to "
        f"{f.numbers['largest ratio']:.2g})"
        for f in own
    ]
    planes = f"{own[0].numbers['planes']:.0f} random planes, by 95 % intervals"
    return f"{start} {verdict}: {'; '.join(parts)}; {planes}, one training run each."


def _below_bounds(own: Sequence[Finding]) -> str:
    violated = [f for f in own if f.verdict is Verdict.VIOLATED]
    if violated:
        faults = "; ".join(f"{f.claim}: {f.numbers['violated']:.0f} are not" for f in violated)
        return f"ERROR OF SEMDIAG, a sound bound is exceeded: {faults}. Please report it."
    gaps = [f.numbers["smallest log10 gap"] for f in own if "smallest log10 gap" in f.numbers]
    checked = sum(int(f.numbers["holds"]) for f in own)
    unmet = sum(int(f.numbers["not_met"]) for f in own)
    tail = f"; {unmet:,} have no bound" if unmet else ""
    tail += "".join(f"; {f.note}" for f in own if f.numbers.get("estimates above the bound"))
    nearest = f", the nearest by a factor of 10^{min(gaps):.1f}" if gaps else ""
    return f"all {checked:,} estimates stay below the sound bounds{nearest}{tail}."


def landscape_sentences(measurements: Measurements) -> list[str]:
    """Say for every plane how the loss rises and how far from the checkpoint the model still works.

    Args:
        measurements: with the table landscape.

    Returns:
        One sentence per model.
    """
    labels, said = model_labels(measurements), []
    for model, planes in landscape_facts(measurements).groupby("model", sort=False):
        first = planes.iloc[0]
        lowest, highest = planes["lowest_loss"].min(), planes["highest_loss"].max()
        kind = "the plane through two snapshots" if first["kind"] == "through" else f"{len(planes)} random planes"
        kind = kind.replace("1 random planes", "one random plane")
        works = _working([float(way) for way in planes["working_distance"]])
        said.append(
            f"{labels[str(model)]}, {kind} ({first['cells']} cells, {first['samples']} samples): the loss is "
            f"{first['checkpoint_loss']:.2g} at the checkpoint and {lowest:.2g} to {highest:.2g} on the cells; "
            f"{works}."
        )
    return said or ["The loss was evaluated on no plane."]


def _working(ways: Sequence[float]) -> str:
    """How far from the checkpoint the model still works, plane by plane."""
    if all(math.isnan(way) for way in ways):
        return "the checkpoint itself has less than 95 % accuracy"
    if max(ways) == 0:
        return "no other cell near the checkpoint keeps 95 % accuracy"
    return f"every cell up to {', '.join(f'{way:.2g}' for way in ways)} ‖θ‖ away keeps 95 % accuracy"
