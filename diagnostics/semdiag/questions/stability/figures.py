"""Figures: ξ against the dispersion, and what was measured below it."""

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import FIXED_MASKS
from semdiag.mathematics.paper_stability import paper_fixed_mask_stability, paper_form_threshold
from semdiag.mathematics.softmax_stability import fixed_mask_stability
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.words import counted, percent
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError, short_labels
from semdiag.presenting.drawing.style import (
    ATTENTION_STYLES,
    DENSE_STYLES,
    FAINT,
    INK,
    attention_style,
    drawing,
    finished,
    lightened,
    panel_grid,
    plain_numbers,
    title_with_facts,
)
from semdiag.questions.stability.answer import exceeding
from semdiag.questions.stability.measure import with_bounds

POINTS = 300
_EXCEEDING = 50
_RANGE = (0.1, 100.0)
_TOP, _FLOOR = 10.0, 1e-5
_MOST = 3  # panels
_NAMED = 5  # layers of models with rows above the paper's form
_SHADE = "#f6dcc3"


@drawing(
    "Constant ξ of a softmax row against its dispersion δ for few, some and many keys, logarithmic axes, in the "
    "paper's form and the sound one, with measured secants of full attention and fixed masks: {shown}.",
    "Every point, a measured change of attention over the change of its scores, must lie below the solid curve, "
    "the smallest constant that holds for all rows of that δ. Where the paper's dashed curve lies below it "
    "(shaded) it is no upper bound; points above it are ringed.",
)
def stability_curves(findings: Findings) -> Figure:
    """Draw ξ = e^δ/n and ξ*(δ, n) against δ for the numbers of keys that rows have, and their secants."""
    rows = _rows(findings)
    if rows.empty:
        raise NothingToDrawError("No secant of full attention or of a fixed mask was measured.")
    panels, labels = _lengths(rows), short_labels(findings.measurements.models)
    figure, axes = panel_grid(len(panels), height=3.6)
    for ax, keys in zip(axes, panels, strict=True):
        _draw_curves(ax, keys)
        _draw_points(ax, keys, rows[rows["kept"] == keys])
    axes[0].set_ylabel("‖p − p′‖₁ / ‖z − z′‖₁ (per nat)")
    found = rows[rows["above"]].groupby(["model", "layer"], sort=False).size().nlargest(_NAMED)
    above = [
        f"{labels[model]}, layer {layer} ({number})"
        for (model, layer), number in zip(found.index.tolist(), found, strict=True)
    ]
    return finished(
        figure,
        f"{_noise_facts(findings, rows)}; at most {POINTS} points per panel.\nUp to {_EXCEEDING} above the "
        "paper's form and the five closest to ξ* are always drawn. No row exceeds ½ (dotted): a constant above "
        "it says nothing. Rows of top-k masks are not shown: their ξ depends on Δ as well."
        + (f"\nAbove the paper's form, most first: {'; '.join(above)}." if above else ""),
    )


def _noise_facts(findings: Findings, secants: pd.DataFrame) -> str:
    """Return in words the noise level, samples and draws behind some secants."""
    levels = ", ".join(percent(level, "g") for level in sorted(secants["level"].unique()))
    samples = int(secants.groupby("model")["sample"].nunique().max())
    seed = findings.measurements.provenance.get("seed")
    drawn = "" if seed is None else f" (seed {seed})"
    count = f"{counted(samples, 'sample')} per model"
    return f"input noise {levels} of each embedded token's RMS, {count}, one draw each{drawn}"


def _lengths(rows: pd.DataFrame) -> list[int]:
    """Return the numbers of keys at the rows' 10th, 50th and 90th percentile, and the one most often exceeded."""
    chosen = {int(keys) for keys in rows["kept"].quantile([0.1, 0.5, 0.9], interpolation="nearest")}
    above = rows.loc[rows["above"], "kept"].value_counts().index
    if len(above) and int(above[0]) not in chosen:
        if len(chosen) == _MOST:
            chosen.remove(min(chosen, key=lambda keys: abs(keys - int(above[0]))))
        chosen.add(int(above[0]))
    return sorted(chosen)


def _rows(findings: Findings) -> pd.DataFrame:
    """Return nonzero secants of full attention and fixed masks beside ξ, full attention first."""
    measurements, parts = findings.measurements, []
    models = measurements.models[measurements.models["attention"].isin(FIXED_MASKS)]
    for model, attention in zip(models["model"], models["attention"], strict=True):
        secants = with_bounds(measurements.secants[measurements.secants["model"] == model], attention)
        moved = (secants["secant"] > 0) & (secants["dispersion"] > 0) & np.isfinite(secants["ln_sound"])
        parts.append(secants.assign(attention=attention, above=exceeding(secants, "ln_paper"))[moved])
    rows: pd.DataFrame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return rows


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
    threshold = paper_form_threshold(torch.tensor([keys])).item()
    facts = [f"paper form below the sound one for δ < {threshold:.2f}"] if threshold else []
    facts.append(f"{len(rows):,} measured pairs of rows, {rows['above'].sum():,} above the paper's form")
    title_with_facts(ax, f"n = {counted(keys, 'key')}", facts)
    excess = np.log(rows["secant"]) - rows["ln_paper"]
    always = (np.log(rows["secant"]) - rows["ln_sound"]).nlargest(5).index
    always = always.union(excess[rows["above"]].nlargest(_EXCEEDING).index)
    others = rows.drop(index=always)
    chosen = others.sample(min(POINTS - len(always), len(others)), random_state=0).index.union(always)
    points = rows.loc[chosen]
    kinds = [kind for kind in ATTENTION_STYLES | DENSE_STYLES if kind in set(points["attention"])]
    for kind in kinds:
        style, of_kind = attention_style(kind), points[points["attention"] == kind]
        ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", markersize=4,
                label=f"{style.name}, measured")  # fmt: skip
        ax.plot(
            of_kind["dispersion"], of_kind["secant"].clip(lower=_FLOOR), marker=style.marker, markersize=2,
            markeredgewidth=0, color=lightened(style.color, 0.2), linestyle="none", zorder=3,
        )  # fmt: skip
        above = of_kind[of_kind["above"]]
        ax.plot(
            above["dispersion"], above["secant"], marker=style.marker, markersize=4.5, markeredgecolor=INK,
            markeredgewidth=0.9, color=style.color, linestyle="none", zorder=4,
        )  # fmt: skip
    if points["above"].any():
        ax.plot(
            [], [], marker="o", markersize=4.5, markerfacecolor="none", markeredgecolor=INK, linestyle="none",
            label="above the paper's form",
        )  # fmt: skip


HEADINGS = (
    Heading(
        "stability",
        "Is the stability bound respected?",
        (stability_curves,),
        (
            "A constant bounds the worst pair of rows; the response is an average under one kind of noise. A "
            "small δ can lower the first and leave the second high.",
            "ξ bounds the attention weights by the change of the scores, not by noise at the input: earlier "
            "layers and Γ decide that.",
            "The heavy-hitter form takes the larger δ and the smaller Δ of both rows. Rows with Δ ≤ 0 are "
            "counted, not judged.",
        ),
    ),
)
