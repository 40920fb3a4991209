"""Figures: its figures and tables."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError, panels_of
from semdiag.presenting.drawing.style import INK, drawing, finished, number_layers, panel_grid
from semdiag.questions.mask_stability.answer import (
    heads_pooled,
    mask_facts,
    mask_table,
    noise_words,
)

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


def shades(count: int) -> list[str]:
    """Return colours from light to dark that the colour-blind can tell apart."""
    import seaborn as sns  # takes a second

    return list(sns.color_palette("viridis_r", count + 1).as_hex())[1:]


@drawing(
    "Share of queries whose mask stays exactly the same under input noise, per layer, with 95% "
    "intervals and the certified share dotted: {shown}.",
    "A curve near 1 belongs to a layer whose masks this noise hardly changes. The dotted line is what can be "
    "proven from Δ and the change of the scores alone; masks between it and the curves survive without a proof.",
)
def masks_unchanged(findings: Findings) -> Figure:
    """Draw the share of unchanged masks: against noise, one curve per layer; with one level, against layers."""
    models = judged_models(findings)
    table, by_layer = findings(mask_table), findings(heads_pooled)
    figure, axes = panel_grid(len(models), height=2.9)
    for ax, (model, title) in zip(axes, models, strict=True):
        layers = by_layer[by_layer["model"] == model]
        if layers["level"].nunique() > 1:
            _against_noise(ax, layers, table[(table["model"] == model) & (table["layer"] == ALL)], findings)
        else:
            _against_layers(ax, layers, findings)
        ax.set_title(title, fontsize=9)
    axes[0].set_ylabel("share of masks unchanged, S′ = S")
    return finished(
        figure,
        f"{mask_facts(findings)}.\nBands and bars: 95% intervals from resampled sequences; heads pooled by "
        "mean; dotted: certified to be unchanged (all layers).",
    )


def _against_noise(ax: Axes, by_layer: pd.DataFrame, all_layers: pd.DataFrame, findings: Findings) -> None:
    layers = sorted(by_layer["layer"].unique())
    for place, (layer, color) in enumerate(zip(layers, shades(len(layers)), strict=True)):
        rows = by_layer[by_layer["layer"] == layer]
        ax.plot(
            rows["level"], rows["exact"], color=color, marker=MARKERS[place % len(MARKERS)], markersize=4,
            label=f"layer {layer}",
        )  # fmt: skip
        ax.fill_between(rows["level"], rows["exact_low"], rows["exact_high"], color=color, alpha=0.25, linewidth=0)
    all_layers = all_layers.sort_values("level")
    ax.plot(
        all_layers["level"], all_layers["certified"], color=INK, linestyle=":", linewidth=1.3, label="certified"
    )
    ax.set_xscale("log")
    ax.set_xticks(all_layers["level"], [noise_words(findings, level) for level in all_layers["level"]])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("noise (standard deviation)")
    ax.set_ylim(0, 1.03)


def _against_layers(ax: Axes, rows: pd.DataFrame, findings: Findings) -> None:
    layers = np.arange(len(rows))
    ends = np.abs(np.stack([rows["exact"] - rows["exact_low"], rows["exact_high"] - rows["exact"]]))
    color = shades(3)[1]
    level = noise_words(findings, float(rows["level"].iloc[0]))
    ax.errorbar(layers, rows["exact"], yerr=ends, color=color, marker="o", capsize=3, label=f"noise {level}")
    ax.plot(layers, rows["certified"], color=INK, linestyle=":", linewidth=1.3, label="certified")
    number_layers(ax, rows["layer"].tolist(), layers.tolist())
    ax.set_ylim(0, 1.03)


HEADINGS = (
    Heading(
        "mask-stability",
        "Do masks survive noise?",
        (masks_unchanged,),
        (
            "A full-attention model drops no key. The mask judged there is the one that top-k would choose from "
            "its scores; that model's output does not depend on it. Masks that do not depend on the input "
            "(banded, local blocks) cannot change: not applicable.",
            "Certified means: max dz − min dz over all allowed keys is below Δ, which proves S′ = S. A certified "
            "mask that changed would be an error of semdiag; such rows are counted and named above. In float32 "
            "the certificate leaves room for rounding.",
            "The noise is Gaussian and isotropic; that of training data or of an adversary is neither. Intervals "
            "are about other inputs of the same kind, not about other seeds of the training.",
        ),
    ),
)
