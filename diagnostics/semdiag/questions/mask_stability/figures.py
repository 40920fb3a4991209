"""Figures: its figures and tables."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import CELLS, NothingToDrawError, ink, panels_of
from semdiag.presenting.drawing.style import FAINT, INK, drawing, finished, note_below, number_layers, panel_grid
from semdiag.questions.mask_stability.answer import (
    foreseen_margin,
    heads_pooled,
    mask_facts,
    mask_table,
    noise_words,
    reliability_tables,
)

MARKERS = "osD^vP*Xh<>"  # of layers, noise levels or formats
_LAST = 1.1  # where the last bin stands, in units of the axis before it


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
    "Observed and predicted share of unchanged masks against Δ over the standard deviation of the "
    "boundary pair's change, one curve per noise level: {shown}.",
    "Where the points lie on the dashed curve, Δ alone predicts which masks survive. Points below it "
    "lose their masks to other pairs than the one at the boundary; above it, a few large changes, as "
    "after a swap in an earlier layer, make the standard deviation larger than most changes.",
)
def mask_reliability(findings: Findings) -> Figure:
    """Draw the share of unchanged masks, observed and predicted, against Δ/sd, one curve per noise level."""
    binned = findings(reliability_tables)
    known = {model for model, _ in binned}
    models = [(model, title) for model, title in judged_models(findings) if model in known]
    if not models:
        raise NothingToDrawError("no prediction is known for masks that the scores alone do not determine")
    levels = sorted({level for _, level in binned})
    lowest = min(0.5, *(float(table["low"].min()) for table in binned.values()))
    highest = findings(foreseen_margin) or 1.0
    figure, axes = panel_grid(len(models), height=2.9)
    for ax, (model, title) in zip(axes, models, strict=True):
        shares = []
        for place, (level, color) in enumerate(zip(levels, shades(len(levels)), strict=True)):
            if (model, level) in binned:
                table, marker = binned[model, level], MARKERS[place % len(MARKERS)]
                _draw(ax, table, highest, color, marker, f"noise {noise_words(findings, level)}")
                shares.append(float(table.loc[table["above"], "share"].sum()))
        _label_axis(ax, highest, shares)
        ax.set_ylim(lowest - 0.03, 1.03)
        ax.set_title(title, fontsize=9)
    axes[0].set_ylabel("share of masks with S′ = S")
    return finished(
        figure,
        f"{mask_facts(findings)}.\nTen bins of equal counts, at their median Δ/sd; sd of dz₍ₖ₎ − dz₍ₖ₊₁₎ per "
        "layer and head. One more bin, hollow, of all queries with a larger Δ/sd: of them the prediction foresees "
        "less than one changed mask in all draws. Bars: 95% intervals from resampled sequences. The prediction "
        "is about the boundary pair only.",
    )


def _draw(ax: Axes, table: pd.DataFrame, highest: float, color: str, marker: str, label: str) -> None:
    for above, part in table.groupby("above"):
        places = np.full(len(part), _LAST * highest) if above else part["margin"]
        ends = np.abs(np.stack([part["exact"] - part["low"], part["high"] - part["exact"]]))
        ax.errorbar(
            places, part["exact"], yerr=ends, color=color, marker=marker, markersize=4, linewidth=1.1, capsize=2,
            markerfacecolor="white" if above else color, label=None if above else label,
        )  # fmt: skip
        if not above:
            ax.plot(places, part["predicted"], "--", color=FAINT, linewidth=0.9, label="predicted, Φ(Δ/sd)")


def _label_axis(ax: Axes, highest: float, shares: list[float]) -> None:
    """Number the axis up to the last bin, and name the share of the queries in it."""
    ax.set_xlim(-0.03 * highest, (_LAST + 0.08) * highest)
    ticks = [at for at in ax.get_xticks() if 0 <= at < 0.95 * highest]
    most = f"{min(shares):.0%}" + (f" to {max(shares):.0%}" if max(shares) - min(shares) >= 0.005 else "")
    ax.set_xticks([*ticks, _LAST * highest], [*(f"{at:g}" for at in ticks), f"> {highest:.2g}"])
    ax.set_xlabel(f"Δ / sd (> {highest:.2g}: {most} of the queries)")


@drawing(
    "Share of unchanged masks as coloured cells, layers by noise levels, or by models: {shown}.",
    "Read the layers in their order: noise is passed on from layer to layer, so later masks can "
    "change although nothing was added there. --at-block adds the noise to the input of one block and "
    "leaves earlier blocks clean.",
)
def mask_heat_map(findings: Findings) -> Figure:
    """Draw the share of unchanged masks for every layer and noise level as coloured cells."""
    models = judged_models(findings)
    table = findings(heads_pooled)
    layers = sorted(table["layer"].unique())
    if table["level"].nunique() == 1 and len(models) == 1:
        raise NothingToDrawError("One model under one level of noise: the curve above shows it.")
    if table["level"].nunique() == 1:
        return _side_by_side(findings, models, table, layers)
    figure, axes = panel_grid(len(models), height=1.3 + 0.28 * len(layers), sharey=False)
    for ax, (model, title) in zip(axes, models, strict=True):
        of_model = table[table["model"] == model]
        cells = of_model.pivot(index="layer", columns="level", values="exact")
        image = _cells(ax, cells)
        ax.set_xticks(range(len(cells.columns)), [noise_words(findings, float(level)) for level in cells.columns])
        ax.set_yticks(range(len(cells.index)), [str(layer) for layer in cells.index])
        ax.set_xlabel("noise (standard deviation)")
        ax.set_title(title, fontsize=9)
        ax.grid(visible=False)
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.8).set_label("share unchanged", fontsize=9)
    note_below(figure, f"{mask_facts(findings)}; heads pooled by mean.")
    return figure


def _cells(ax: Axes, cells: pd.DataFrame) -> AxesImage:
    image = ax.imshow(cells.to_numpy(float), vmin=0, vmax=1, cmap=CELLS, aspect="auto", origin="lower")
    for (row, column), share in np.ndenumerate(cells.to_numpy(float)):
        if np.isfinite(share):
            ax.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=9, color=ink(share))
    return image


def _side_by_side(
    findings: Findings, models: list[tuple[str, str]], table: pd.DataFrame, layers: list[int]
) -> Figure:
    """Draw models by layers, for a single level of noise."""
    figure, (ax,) = panel_grid(1, height=0.5 + 0.3 * len(models))
    cells = table.pivot(index="model", columns="layer", values="exact").reindex([model for model, _ in models])
    image = _cells(ax, cells)
    ax.invert_yaxis()
    ax.set_yticks(range(len(models)), [title for _, title in models], fontsize=9)
    number_layers(ax, layers, list(range(len(layers))))
    ax.grid(visible=False)
    figure.colorbar(image, ax=ax, pad=0.01).set_label("share unchanged", fontsize=9)
    level = noise_words(findings, float(table["level"].iloc[0]))
    note_below(figure, f"{mask_facts(findings)}; noise of {level} (standard deviation); heads pooled by mean.")
    return figure


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
        (masks_unchanged, mask_reliability, mask_heat_map),
        (
            "A full-attention model drops no key. The mask judged there is the one that top-k would choose from "
            "its scores; that model's output does not depend on it. Masks that do not depend on the input "
            "(banded, block-local) cannot change: not applicable.",
            "Certified means: max dz − min dz over all allowed keys is below Δ, which proves S′ = S. A certified "
            "mask that changed would be an error of semdiag; such rows are counted and named above. In float32 "
            "the certificate leaves room for rounding.",
            "The noise is Gaussian and isotropic; that of training data or of an adversary is neither. Intervals "
            "are about other inputs of the same kind, not about other seeds of the training.",
        ),
    ),
)
