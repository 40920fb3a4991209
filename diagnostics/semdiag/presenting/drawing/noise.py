"""The noise of measured secants, in words for a figure."""

import pandas as pd

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings


def percent(level: float) -> str:
    """Return a relative size of noise, like ``1%``."""
    return f"{100 * level:g}%"


def noise_facts(findings: Findings, secants: pd.DataFrame) -> str:
    """Return in words the noise level, samples and draws behind some secants."""
    levels = ", ".join(percent(float(level)) for level in sorted(secants["level"].unique()))
    samples = int(secants.groupby("model")["sample"].nunique().max())
    seed = findings.measurements.provenance.get("seed")
    drawn = "" if seed is None else f" (seed {seed})"
    count = f"{counted(samples, 'sample')} per model"
    return f"input noise {levels} of each embedded token's RMS, {count}, one draw each{drawn}"
