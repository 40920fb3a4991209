"""The figures of the theory: what they show of tables with known numbers."""

import matplotlib
import numpy as np
import pytest

from semdiag.mathematics.softmax_stability import fixed_mask_stability
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.questions import registry
from semdiag.questions.stability.answer import exceeding_pairs

pytestmark = pytest.mark.usefixtures("few_resamples")


def shown(figure):
    return [ax for ax in figure.axes if ax.get_visible()]


def words(figure):
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def line(ax, label):
    return next(found for found in ax.lines if found.get_label() == label)


@pytest.fixture
def known(four, theory):
    return theory(four)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stability_curves"])
def test_nothing_is_drawn_from_empty_tables(name, four):
    with pytest.raises(NothingToDrawError, match=r"\.$"):
        registry.figures()[name](Findings(four))


@pytest.mark.slow
def test_stability_curves_show_both_forms_where_they_cross_and_secants_below(known):
    figure = registry.figures()["stability_curves"](Findings(known))
    panels = shown(figure)
    # 8 of full attention, 3 of the fixed masks; no panel without a measured row
    assert [ax.get_title(loc="left") for ax in panels] == ["n = 3 keys", "n = 8 keys"]
    for ax, keys in zip(panels, (3, 8), strict=True):
        assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel()) == ("log", "log", "dispersion δ (nats)")
        delta, sound = line(ax, "sound: ξ*(δ, n)").get_data()
        assert sound == pytest.approx(fixed_mask_stability(delta.tolist(), keys).log_value.exp().numpy())
        paper = line(ax, "paper: e^δ/n").get_ydata()
        low = paper < 10
        assert paper[low] == pytest.approx(np.exp(delta[low]) / keys)
    assert panels[0].get_ylabel() == "‖p − p′‖₁ / ‖z − z′‖₁ (per nat)"
    for ax, kinds in zip(panels, ("banded|block", "full"), strict=True):
        points = np.concatenate([found.get_xydata() for found in ax.lines if found.get_markersize() == 2])
        assert len(points) == min(300, known.secants["model"].str.contains(kinds).sum())
        assert np.unique(points[:, 1]) == pytest.approx([0.02])
    assert legend(figure)[-3:] == ["banded, measured", "local blocks, measured", "full, measured"]
    assert "input noise 1% of each embedded token's RMS, 6 samples per model" in words(figure)


@pytest.mark.slow
def test_stability_curves_draw_few_points_and_the_closest_one(known):
    secants = known.secants.loc[known.secants.index.repeat(20)].reset_index(drop=True)
    closest = secants.index[secants["model"].str.contains("full")][0]
    secants.loc[closest, "weight_change"] = 0.05 * secants.loc[closest, "score_change"]
    *_, ax = shown(registry.figures()["stability_curves"](Findings(known.replace(secants=secants))))
    (points,) = (found.get_xydata() for found in ax.lines if found.get_markersize() == 2)
    assert len(points) == 300
    assert points[:, 1].max() == pytest.approx(0.05)


@pytest.mark.slow
def test_stability_curves_draw_every_row_above_the_papers_form(known):
    secants = known.secants.loc[known.secants.index.repeat(20)].reset_index(drop=True)
    few = secants.index[secants["model"].str.contains("banded")][:4]
    secants.loc[few, "dispersion"] = 0.1  # e^0.1 / 3 = 0.368, and the sound constant is larger
    secants.loc[few, "weight_change"] = 0.38 * secants.loc[few, "score_change"]
    findings = Findings(known.replace(secants=secants))
    ax, _ = shown(registry.figures()["stability_curves"](findings))
    assert [exceeding_pairs(findings)["paper"][name] for name in ("violated", "fixed")] == [
        4,
        ", all of fixed masks",
    ]
    assert "4 above the paper's form" in ax.get_title(loc="left") + words(ax.figure)
    assert "Above the paper's form, most first: banded (k = 3), layer" in " ".join(words(ax.figure).split())
    (marked,) = [
        found.get_ydata() for found in ax.lines if found.get_markersize() == 4.5 and len(found.get_xdata())
    ]
    assert marked == pytest.approx([0.38] * 4)
    assert "above the paper's form" in legend(ax.figure)
