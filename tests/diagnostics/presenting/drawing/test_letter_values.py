"""Boxes of many layers: labels that do not overlap, and every percentile drawn, on a page and on a telephone."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle

from semdiag.presenting.drawing.panels import layer_boxes
from semdiag.presenting.drawing.style import attention_style, panel_grid, stacked

PERCENTILES = ("p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p100")


def table(layers):
    values = {name: np.arange(layers) + at for at, name in enumerate(PERCENTILES)}
    return pd.DataFrame({"layer": np.arange(layers), **values})


def drawn(layers, series, narrow, panels=1):
    def draw():
        figure, axes = panel_grid(panels)
        boxes = [(f"{at}", attention_style("full"), table(layers)) for at in range(series)]
        for ax in axes:
            ax.set_ylim(-1, layers + len(PERCENTILES))
            layer_boxes(ax, boxes)
        figure.canvas.draw()
        return figure, axes[0]

    if narrow:
        with stacked():
            return draw()
    return draw()


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("layers", "panels"), [(2, 1), (30, 1), (30, 3), (120, 1)])
def test_numbers_of_layers_do_not_overlap(layers, panels, narrow):
    _, ax = drawn(layers, 1, narrow, panels)
    ends = [text.get_window_extent() for text in ax.get_xticklabels()]
    assert len(ends) >= min(layers, 7)
    assert all(left.x1 < right.x0 for left, right in pairwise(ends))
    assert [text.get_text() for text in ax.get_xticklabels()] == [f"{tick:g}" for tick in ax.get_xticks()]


@pytest.mark.slow
@pytest.mark.parametrize("series", [1, 2])
def test_narrow_boxes_lose_no_percentile(series):
    """Where a quarter of a box cannot be seen all its parts are as wide as the innermost, and none is left out."""
    widths = {}
    for narrow in (False, True):
        figure, ax = drawn(30, series, narrow)
        boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        assert len(boxes) == 4 * 30 * series
        assert {box.get_y() for box in boxes[:4]} == {0.0, 1.0, 2.0, 3.0}
        assert {box.get_y() + box.get_height() for box in boxes[:4]} == {5.0, 6.0, 7.0, 8.0}
        widths[narrow] = len(np.unique(np.round([box.get_width() for box in boxes], 9)))
        assert figure.get_figwidth() < 5 if narrow else True
    assert widths == {False: 4, True: 4 if series == 1 else 1}
