"""Draws how the twins of the language comparison learn.

python experiments/language_figure.py experiments/language reports/language/language.png
"""

import argparse
from pathlib import Path

import language
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.presenting.drawing.style import attention_style, finished, mask_style, panel_grid, paper_style

PANELS = {  # of the quantities in the table, those that the text is about
    "held_out_loss": "held-out loss, nats a byte",
    "dispersion": "median δ of kept keys, nats",
}
LINES = {"4": (0, (1, 1)), "8": "-", "16": (0, (6, 2))}  # of the three masks of top-k
SHOWN_FROM = 200  # steps; before, all losses fall alike and would flatten the rest


@paper_style
def figure(folder: Path) -> Figure:
    """A panel a quantity, a line a mask: the mean over seeds; the band goes from the smallest to the largest."""
    drawn, axes = panel_grid(len(PANELS), height=2.4, sharey=False)
    for ax, (column, quantity) in zip(axes, PANELS.items(), strict=True):
        ends = pd.Series({mask: _draw(ax, folder, mask, column) for mask in language.MASKS}).dropna()
        ends.index = ends.index.str.replace("topk", "top")
        low, high = ends.idxmin(), ends.idxmax()
        ax.set_title(f"{quantity}: {low} ends lowest ({ends[low]:.3g}), {high} highest ({ends[high]:.3g})")
        ax.set_xlabel("millions of bytes seen")
    return finished(
        drawn,
        "Causal decoders of 0.9 million parameters on the King James Bible that differ in the keys a query keeps. "
        "Lines: means of three seeds; bands: from the smallest to the largest.",
    )


def _draw(ax: Axes, folder: Path, mask: str, column: str) -> float:
    """Draw one mask's runs; return where their mean ends, NaN without runs."""
    files = [language.record(folder, mask, seed) for seed in language.SEEDS]
    runs = [pd.read_csv(file).query(f"step >= {SHOWN_FROM}") for file in files if file.exists()]
    if not runs:
        return np.nan
    seen = runs[0]["bytes"].to_numpy() / 1e6
    values = np.stack([run[column].to_numpy() for run in runs])
    kind, _, k = mask.partition("-")
    style = mask_style(kind) if kind == "window" else attention_style(kind)
    line = LINES.get(k, "-") if kind == "topk" else style.line
    ax.plot(seen, values.mean(0), color=style.color, linestyle=line, label=mask.replace("topk", "top"))
    ax.fill_between(seen, values.min(0), values.max(0), color=style.color, alpha=0.15, linewidth=0)
    return float(values.mean(0)[-1])


def main() -> None:
    """Read the records and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the records")
    parser.add_argument("out", type=Path, help="the figure")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure(given.folder).savefig(given.out, dpi=200)
    print(given.out)


if __name__ == "__main__":
    main()
