"""The models whose masks were judged, and the noise, in words for a figure."""

from typing import Any

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.words import counted, percent
from semdiag.presenting.drawing.panels import NothingToDrawError, panels_of

MARKERS = "osD^vP*Xh<>"  # of layers, noise levels or formats


def judged_models(findings: Findings, table: str = "masks") -> list[tuple[str, str]]:
    """Return the models with an input-dependent mask that was judged, last snapshots first."""
    measurements = findings.measurements
    kept = getattr(measurements, table).groupby("model")["kept"].last()
    judged = []
    for panel in panels_of(measurements.models):
        for series in panel.series:
            if series.model in kept.index:
                supposed = f": top-{kept[series.model]} it would choose" if series.attention in DENSE else ""
                judged.append((series.model, f"{panel.title}\n{series.label}{supposed}"))
    if not judged:
        raise NothingToDrawError("No mask of these models depends on the input, so none can change.")
    return judged


def noise_words(findings: Findings, level: float) -> str:
    """Return a size of noise in words: ``1%``, or ``0.01`` if it is absolute."""
    return f"{level:g}" if _plan(findings).get("absolute") else percent(level, "g")


def mask_facts(findings: Findings) -> str:
    """Return noise, samples and draws behind the judged masks."""
    plan = _plan(findings)
    block = plan.get("block", 0)
    where = "the embedded tokens" if not block else f"the input of block {block}"
    size = "absolute standard deviation" if plan.get("absolute") else "relative to each token's RMS"
    samples = int(findings.measurements.masks.groupby("model")["sample"].nunique().max())
    seed = "" if plan.get("seed") is None else f" (seed {plan['seed']})"
    draws = int(findings.measurements.masks["draws"].iloc[0])
    return f"Noise on {where}, {size}; {counted(samples, 'sample')} per model, {draws} draws{seed}"


def _plan(findings: Findings) -> dict[str, Any]:
    plan = findings.measurements.provenance.get("mask_noise", {})
    return plan if isinstance(plan, dict) else {}


def shades(count: int) -> list[str]:
    """Return colours from light to dark that the colour-blind can tell apart."""
    import seaborn as sns  # takes a second

    return list(sns.color_palette("viridis_r", count + 1).as_hex())[1:]
