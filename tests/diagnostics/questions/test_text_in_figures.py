"""No text of a figure lies over another or leaves the picture: measured by the renderer, on real checkpoints."""

from contextlib import nullcontext
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import panel_grid, stacked
from semdiag.questions import registry
from semdiag.questions.bounds.measure import BoundsPlan
from semdiag.questions.compare.measure import ComparePlan
from semdiag.questions.convergence.measure import ConvergencePlan, convergence_survey
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.landscape.measure import LandscapePlan
from semdiag.questions.lipschitz.measure import LipschitzPlan
from semdiag.questions.mask_precision.measure import PrecisionPlan
from semdiag.questions.mask_stability.measure import NoisePlan
from semdiag.questions.overlap.measure import OverlapPlan
from semdiag.questions.stability.measure import SecantsPlan

pytestmark = pytest.mark.usefixtures("few_resamples")

CHECKPOINTS = Path(__file__).parents[3] / "checkpoints"
EVEN, MISSING = "even-pairs-{}-seed-153476998", "missing-duplicate-{}-seed-153476998"
NAMES = [
    *(EVEN.format(kind) for kind in ("full", "topk-5", "banded-5-global-1")),
    *(MISSING.format(kind) for kind in ("full", "topk-5")),
]
TOUCHING = 2.0  # pixels at 100 per inch by which boxes of neighbouring texts may share their margins


@pytest.fixture(scope="module")
def real():
    """Findings on five committed checkpoints, every probe asked, few samples."""
    plans = (
        SecantsPlan((0.01,)), BoundsPlan(), NoisePlan((0.01,), draws=1), OverlapPlan(5),
        PrecisionPlan(("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")),
        KSweepPlan(8, True, kinds=("topk", "window", "topk-layer", "random")),
        LandscapePlan(grid=3), LipschitzPlan(1, 2, 2, 8),
        ComparePlan(),
    )  # fmt: skip
    conditions = Conditions(samples=4, k=(5,), probe_samples=2, plans=plans)
    return Findings(
        convergence_survey(
            [CHECKPOINTS / name / "last.pt" for name in NAMES],
            conditions,
            plan=ConvergencePlan(),
        )
    )


def corners(text, renderer):
    """(4, 2): of the rectangle around a text, turned as it is."""
    box, turned = text.get_window_extent(renderer), text.get_rotation()
    center = np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2
    if turned % 90:
        text.set_rotation(0)
        box = text.get_window_extent(renderer)
        text.set_rotation(turned)
    else:
        turned = 0
    angle = np.deg2rad(turned)
    half = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * [box.width / 2, box.height / 2]
    return center + half @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def overlap(one, other):
    """By how many pixels two rectangles lie over each other, along the axis where they do least."""
    sides = [
        (box[at + 1] - box[at]) / np.linalg.norm(box[at + 1] - box[at]) for box in (one, other) for at in (0, 1)
    ]
    ends = [((one @ side).min(), (one @ side).max(), (other @ side).min(), (other @ side).max()) for side in sides]
    return min(min(high, top) - max(low, bottom) for low, high, bottom, top in ends)


def faults(figure, monkeypatch):
    """What is drawn over another text or outside the picture, in words."""
    drawn = []
    draw = Text.draw

    def remember(text, renderer, *args, **kwargs):
        draw(text, renderer, *args, **kwargs)
        if text.get_visible() and text.get_text().strip():
            drawn.append((text.get_text(), corners(text, renderer)))

    with monkeypatch.context() as patched:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # the layout is settled
        patched.setattr(Text, "draw", remember)
        canvas.draw()
    size = np.array([figure.bbox.width, figure.bbox.height])
    said = [f"clipped: {text!r}" for text, box in drawn if (box < -1).any() or (box > size + 1).any()]
    for (text, box), (other, over) in combinations(drawn, 2):
        if overlap(box, over) > TOUCHING and not np.allclose(box, over):
            said.append(f"{text!r} over {other!r}")
    return said


@pytest.mark.slow
def test_the_measure_sees_text_over_text_and_text_that_is_cut(monkeypatch):
    figure, (left, right) = panel_grid(2)
    assert faults(figure, monkeypatch) == []
    left.set_title(
        "a title that is much too long for its panel, so that it runs into the one on its right side " * 2
    )
    right.set_title("right")
    assert any(" over 'right'" in fault for fault in faults(figure, monkeypatch))
    cut = Figure(figsize=(2, 1))
    cut.text(0.9, 0.5, "leaves the picture")
    assert faults(cut, monkeypatch) == ["clipped: 'leaves the picture'"]


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [False, True], ids=["page", "telephone"])
@pytest.mark.parametrize("name", registry.figures())
def test_no_text_lies_over_another_or_is_cut(real, name, narrow, monkeypatch):
    with stacked() if narrow else nullcontext():
        try:
            figure = registry.figures()[name](real)
        except NothingToDrawError:
            assert name in ("retrieval_by_distance", "facts_by_perplexity")
            pytest.skip("nothing to draw of these checkpoints")
    assert faults(figure, monkeypatch) == []
