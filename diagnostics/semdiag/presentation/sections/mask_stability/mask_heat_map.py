"""Where masks change: layer by noise, with the share in each cell."""

import numpy as np
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.findings.mask_stability import mask_table
from semdiag.presentation.drawing.style import note_below, panel_grid, paper_style
from semdiag.presentation.sections.mask_stability.panels import judged_models, mask_facts, noise_words


@paper_style
def mask_heat_map(findings: Findings) -> Figure:
    """Draw the share of unchanged masks for every layer and noise level as coloured cells.

    Args:
        findings: with masks.

    Returns:
        One panel per model, one colour scale from 0 to 1.

    Raises:
        NothingToDrawError: if no mask was judged.
    """
    models = judged_models(findings)
    table = findings(mask_table)
    table = table[table["layer"] != "all"]
    layers = sorted(table["layer"].unique())
    figure, axes = panel_grid(len(models), height=1.3 + 0.28 * len(layers), sharey=False)
    for ax, (model, title) in zip(axes, models, strict=True):
        own = table[table["model"] == model]
        cells = own.pivot_table(index="layer", columns="level", values="exact")
        image = ax.imshow(cells.to_numpy(float), vmin=0, vmax=1, cmap="cividis", aspect="auto", origin="lower")
        for (row, column), share in np.ndenumerate(cells.to_numpy(float)):
            ax.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=7, color=_ink(share))
        ax.set_xticks(range(len(cells.columns)), [noise_words(findings, float(level)) for level in cells.columns])
        ax.set_yticks(range(len(cells.index)), [str(layer) for layer in cells.index])
        ax.set_xlabel("noise (standard deviation)")
        ax.set_title(title, fontsize=8)
        ax.grid(visible=False)
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.8).set_label("share of masks unchanged", fontsize=8)
    note_below(figure, f"{mask_facts(findings)}; heads pooled by mean.")
    return figure


def _ink(share: float) -> str:
    """Colour of the writing on a cell: cividis is dark below and light above."""
    return "black" if share > 0.55 else "white"
