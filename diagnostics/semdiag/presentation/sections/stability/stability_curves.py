"""The softmax constant ξ against the dispersion in both forms, with what was measured below it."""

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.capturing.attention_kinds import DENSE
from semdiag.findings.findings import Findings
from semdiag.mathematics.paper_stability import paper_fixed_mask_stability, paper_form_threshold
from semdiag.mathematics.softmax_stability import fixed_mask_stability
from semdiag.measurement.probes.noise.softmax_bounds import with_bounds
from semdiag.presentation.drawing.noise import noise_facts
from semdiag.presentation.drawing.panels import NothingToDrawError
from semdiag.presentation.drawing.style import (
    FAINT,
    INK,
    attention_style,
    finished,
    lightened,
    panel_grid,
    paper_style,
    plain_numbers,
    title_with_facts,
)

_MOST = 3  # numbers of keys, the commonest
POINTS = 300
_RANGE = (0.1, 100.0)
_TOP, _FLOOR = 10.0, 1e-5
_SHADE = "#f6dcc3"


@paper_style
def stability_curves(findings: Findings) -> Figure:
    """Draw ξ = e^δ/n and ξ*(δ, n) against δ for the numbers of keys that full models have, and their secants.

    Args:
        findings: with secants of full-attention models.

    Returns:
        One panel per number of keys: the commonest of the measured full models, at most three.

    Raises:
        NothingToDrawError: if no secant of a full model was measured.
    """
    rows = _full_rows(findings)
    if rows.empty:
        raise NothingToDrawError("No secant of a full-attention model was measured.")
    panels = sorted(int(keys) for keys in rows["kept"].value_counts().index[:_MOST])
    figure, axes = panel_grid(len(panels), height=3.0)
    for ax, keys in zip(axes, panels, strict=True):
        _draw_curves(ax, keys)
        _draw_points(ax, keys, rows[rows["kept"] == keys])
    axes[0].set_ylabel("‖p − p′‖₁ / ‖z − z′‖₁ (per nat)")
    return finished(
        figure,
        f"{noise_facts(findings, rows)}; at most {POINTS} points per panel."
        "\nThe five measured secants closest to ξ* are always drawn. No row exceeds ½ (dotted): a constant above "
        "it says nothing.",
    )


def _full_rows(findings: Findings) -> pd.DataFrame:
    """Secants of all full models beside ξ, those with a change to show."""
    measurements = findings.measurements
    full = measurements.models[measurements.models["attention"].isin(DENSE)]["model"]
    rows = with_bounds(measurements.secants[measurements.secants["model"].isin(list(full))], "full")
    moved = (rows["secant"] > 0) & (rows["dispersion"] > 0) & np.isfinite(rows["ln_sound"])
    shown: pd.DataFrame = rows[moved]
    return shown


def _draw_curves(ax: Axes, keys: int) -> None:
    delta = np.geomspace(*_RANGE, 181)
    sound = fixed_mask_stability(torch.tensor(delta), keys).log_value.numpy()
    paper = paper_fixed_mask_stability(torch.tensor(delta), keys).log_value.numpy()
    shown = np.exp(np.minimum(paper, math.log(10 * _TOP)))
    ax.fill_between(delta, shown, np.exp(sound), where=paper < sound, color=_SHADE, linewidth=0,
                    label="paper form below the sound one")  # fmt: skip
    ax.plot(delta, np.exp(sound), color=INK, linewidth=1.6, label="sound: ξ*(δ, n)")
    ax.plot(delta, shown, color=INK, linewidth=1.3, linestyle=(0, (5, 2)), label="paper: e^δ/n")
    ax.axhline(0.5, color=FAINT, linewidth=0.7, linestyle=(0, (1, 2)))
    ax.set(xscale="log", yscale="log", xlim=_RANGE, ylim=(_FLOOR, _TOP), xlabel="dispersion δ (nats)")
    plain_numbers(ax.xaxis)


def _draw_points(ax: Axes, keys: int, rows: pd.DataFrame) -> None:
    style = attention_style("full")
    ax.plot(
        [], [], marker="o", color=style.color, linestyle="none", markersize=4, label="full attention, measured"
    )
    threshold = paper_form_threshold(torch.tensor([keys])).item()
    facts = [f"paper form below the sound one for δ < {threshold:.2f}"] if threshold else []
    facts.append(f"{len(rows):,} measured pairs of rows")
    title_with_facts(ax, f"n = {keys} keys", facts)
    closest = (np.log(rows["secant"]) - rows["ln_sound"]).nlargest(5).index
    others = rows.drop(index=closest)
    chosen = others.sample(min(POINTS - len(closest), len(others)), random_state=0).index.union(closest)
    points = rows.loc[chosen]
    ax.plot(
        points["dispersion"], points["secant"].clip(lower=_FLOOR), marker="o", markersize=2, markeredgewidth=0,
        color=lightened(style.color, 0.2), linestyle="none", zorder=3,
    )  # fmt: skip
