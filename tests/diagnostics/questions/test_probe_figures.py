"""The figures and words of landscape and lipschitz: what they show of tables with known numbers."""

import json

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.presenting.drawing.style import ATTENTION_STYLES
from semdiag.questions import registry
from semdiag.reporting.report import measured_questions, write_report

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def pair(model, probes):
    return probes(Measurements.concat([model("full"), model("topk")]))


def panels(figure):
    return [ax for ax in figure.axes if ax.get_visible() and ax.get_label() != "<colorbar>"]


def words(figure):
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


@pytest.mark.slow
def test_contour_shows_the_cells_themselves(pair):
    figure = registry.figures()["landscape_contour"](Findings(pair))
    axes = panels(figure)
    assert len(axes) == 2 * 2 * 2  # models, planes, quantities
    assert (axes[0].get_xlabel(), axes[0].get_ylabel()) == (
        "first direction, in ‖θ‖", "second direction, in ‖θ‖",
    )  # fmt: skip
    rows = pair.landscape[(pair.landscape["model"].str.contains("full")) & (pair.landscape["plane"] == 0)]
    grid = rows[rows["place"] == "grid"].sort_values(["y", "x"])
    for ax, quantity in zip(axes, ("loss", "accuracy"), strict=False):
        (mesh,) = (c for c in ax.collections if isinstance(c, QuadMesh))
        assert np.asarray(mesh.get_array()).ravel().tolist() == grid[quantity].tolist()
    scales = {(a.norm.vmin, a.norm.vmax) for ax in axes[::2] for a in ax.collections if isinstance(a, QuadMesh)}
    assert len(scales) == 1
    assert "Cross: the checkpoint" in words(figure)
    assert "2 random planes" in words(figure)
    assert "seed 0" in words(figure)
    assert "6 samples" in words(figure)
    assert "interpolated" in words(figure)


@pytest.mark.slow
def test_a_wide_range_of_losses_is_logarithmic_and_broken_cells_are_marked(pair):
    table = pair.landscape.copy()
    table["loss"] = table["loss"] ** 4
    table.loc[table.index[4], "loss"] = np.inf
    figure = registry.figures()["landscape_contour"](Findings(pair.replace(landscape=table)))
    figure.draw_without_rendering()
    (mesh,) = (c for c in panels(figure)[0].collections if isinstance(c, QuadMesh))
    assert isinstance(mesh.norm, LogNorm)
    assert np.ma.masked_invalid(mesh.get_array()).mask.sum() == 1


@pytest.mark.slow
def test_percentile_curves_by_radius(pair):
    axes = panels(registry.figures()["lipschitz_percentiles"](Findings(pair)))
    assert len(axes) == 4
    own = pair.loss_secants[
        (pair.loss_secants["model"].str.contains("topk")) & (pair.loss_secants["group"] == "all")
    ]
    for ax, percentile in zip(axes, (50, 75, 95, 99), strict=True):
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        line = next(x for x in ax.lines if x.get_color() == ATTENTION_STYLES["topk"].color)
        expected = [np.percentile(own[own["radius"] == r]["slope"], percentile) for r in (0.5, 1.0)]
        assert line.get_xdata().tolist() == [0.5, 1.0]
        assert line.get_ydata().tolist() == pytest.approx(expected)
    axes[0].figure.draw_without_rendering()
    assert len({round(ax.title.get_window_extent().y0) for ax in axes}) == 1  # titles stand on one line
    said = words(axes[0].figure)
    assert "5 random planes (seed 0)" in said
    assert "loss over 6 samples" in said
    assert "95%" in said


@pytest.mark.slow
def test_a_report_with_probes_says_what_was_found(pair, tmp_path):
    assert measured_questions(Findings(pair))[-2:] == ["lipschitz", "landscape"]
    page, _ = write_report(
        Findings(pair), tmp_path / "r", "semdiag", formats=(), sections=("lipschitz", "landscape")
    )
    summary = json.loads((tmp_path / "r" / "summary.json").read_text(encoding="utf-8"))
    said = " ".join(summary["details"]["lipschitz"])
    assert "than around the full one, p95: holds (radii = 2, lower = 2, higher = 0, planes = 5" in said
    assert "exceed the bound" in said
    assert "no other cell near the checkpoint keeps 95%" in " ".join(summary["details"]["landscape"])
    assert "the loss is 0.001 at the checkpoint and 0.001 to 1.4 on the cells" in " ".join(
        summary["details"]["landscape"]
    )
    data = {file.stem for file in (page.parent / "data").glob("*.csv")}
    assert {"landscape", "landscape_planes", "lipschitz_secants", "lipschitz_ratios"} <= data
    cells = pd.read_csv(page.parent / "data" / "landscape.csv")
    assert len(cells) == len(pair.landscape)
    text = page.read_text(encoding="utf-8")
    assert "How steep is the loss around the checkpoint?" in text
    assert "What does the loss look like around the checkpoint?" in text


@pytest.mark.slow
def test_a_violated_bound_is_loud(pair, tmp_path):
    broken = pair.replace(jacobians=pair.jacobians.assign(ln_sound=-3.0))
    write_report(Findings(broken), tmp_path / "r", "semdiag", formats=(), sections=("lipschitz",))
    summary = json.loads((tmp_path / "r" / "summary.json").read_text(encoding="utf-8"))
    assert "ERROR OF SEMDIAG: block Jacobians" in " ".join(summary["details"]["lipschitz"])


@pytest.mark.slow
def test_mixed_orderings_are_called_mixed(pair, tmp_path):
    secants = pair.loss_secants.copy()
    high = secants["model"].str.contains("topk") & (secants["radius"] == 1.0)
    secants.loc[high, "slope"] *= 10
    write_report(
        Findings(pair.replace(loss_secants=secants)), tmp_path / "r", "semdiag", (), sections=("lipschitz",)
    )
    summary = json.loads((tmp_path / "r" / "summary.json").read_text(encoding="utf-8"))
    first, *each = summary["details"]["lipschitz"]
    cases = "0 of 4 cases (percentiles of secants), steeper in 0, inconclusive in 4"
    assert first.startswith(f"The loss is less steep around the sparse model in {cases}; 0 of ")
    assert "p50: inconclusive (radii = 2, lower = 1, higher = 1," in " ".join(each)


@pytest.mark.slow
def test_saved_probes_are_drawn_again(pair, tmp_path):
    pair.save(tmp_path / "data")
    again = Measurements.load(tmp_path / "data")
    for name in ("landscape", "loss_secants", "loss_gradients", "jacobians"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(pair, name))
