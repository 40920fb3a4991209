"""Where masks change: layer by noise, with the share in each cell."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.heat_map import ink
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import note_below, number_layers, panel_grid, paper_style
from semdiag.questions.mask_stability.answer import heads_pooled
from semdiag.questions.mask_stability.figures.panels import judged_models, mask_facts, noise_words


@paper_style
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
        ax.set_title(title, fontsize=8)
        ax.grid(visible=False)
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.8).set_label("share unchanged", fontsize=8)
    note_below(figure, f"{mask_facts(findings)}; heads pooled by mean.")
    return figure


def _cells(ax: Axes, cells: pd.DataFrame) -> AxesImage:
    image = ax.imshow(cells.to_numpy(float), vmin=0, vmax=1, cmap="cividis", aspect="auto", origin="lower")
    for (row, column), share in np.ndenumerate(cells.to_numpy(float)):
        if np.isfinite(share):
            ax.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=7, color=ink(share))
    return image


def _side_by_side(
    findings: Findings, models: list[tuple[str, str]], table: pd.DataFrame, layers: list[int]
) -> Figure:
    """Draw models by layers, for a single level of noise."""
    figure, (ax,) = panel_grid(1, height=0.5 + 0.3 * len(models))
    cells = table.pivot(index="model", columns="layer", values="exact").reindex([model for model, _ in models])
    image = _cells(ax, cells)
    ax.invert_yaxis()
    ax.set_yticks(range(len(models)), [title for _, title in models], fontsize=7)
    number_layers(ax, layers, list(range(len(layers))))
    ax.grid(visible=False)
    figure.colorbar(image, ax=ax, pad=0.01).set_label("share unchanged", fontsize=8)
    level = noise_words(findings, float(table["level"].iloc[0]))
    note_below(figure, f"{mask_facts(findings)}; noise of {level} (standard deviation); heads pooled by mean.")
    return figure
