"""The figures of the theory: what they show of tables with known numbers."""

import matplotlib
import numpy as np
import pandas as pd
import pytest

from semdiag.mathematics.softmax_stability import fixed_mask_stability
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import find_pairs
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.schema import optional_tables
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.questions import registry
from semdiag.questions.bounds.answer.corollary import corollary_table
from semdiag.questions.bounds.answer.published import published_table
from semdiag.questions.stability.glance import exceeding_pairs

pytestmark = pytest.mark.usefixtures("few_resamples")

# shared/theory.md, section 4: left sides of the paper's conditions at p75, p90, p95, p100.
PUBLISHED = {
    "ListOps": ([0.970, 0.688, 0.564, 0.565], [0.898, 0.674, 0.586, 0.612]),
    "Parity": ([0.704, 0.759, 0.803, 1.220], [0.723, 0.808, 0.862, 1.286]),
    "Even pairs": ([3.174, 1.976, 1.315, 1.799], [3.025, 2.102, 1.424, 1.897]),
    "Missing duplicates": ([1.531, 1.088, 0.666, 1.143], [1.529, 1.152, 0.718, 1.204]),
}


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


def test_the_papers_numbers_give_the_papers_conditions():
    table = published_table()
    for task, (weight, inputs) in PUBLISHED.items():
        own = table[table["task"] == task]
        assert own["percentile"].tolist() == [75, 90, 95, 100]
        assert own["weight_left_side"].round(3).tolist() == weight
        assert own["input_left_side"].round(3).tolist() == inputs


@pytest.mark.parametrize("name", ["stability_curves", "attention_response", "secants_under_bounds"])
def test_nothing_is_drawn_from_empty_tables(name, four):
    with pytest.raises(NothingToDrawError, match=r"\.$"):
        registry.figures()[name](Findings(four))


@pytest.mark.parametrize("name", ["corollary_plane", "corollary_conditions"])
def test_nothing_is_drawn_without_a_pair(name, model, theory):
    with pytest.raises(NothingToDrawError, match="compared with a full one"):
        registry.figures()[name](Findings(theory(model("topk"))))


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
    assert legend(figure)[-3:] == ["banded, measured", "block-local, measured", "full, measured"]
    assert "input noise 1 % of each embedded token's RMS, 6 samples per model" in words(figure)


def test_stability_curves_draw_few_points_and_the_closest_one(known):
    secants = known.secants.loc[known.secants.index.repeat(20)].reset_index(drop=True)
    closest = secants.index[secants["model"].str.contains("full")][0]
    secants.loc[closest, "weight_change"] = 0.05 * secants.loc[closest, "score_change"]
    *_, ax = shown(registry.figures()["stability_curves"](Findings(known.replace(secants=secants))))
    (points,) = (found.get_xydata() for found in ax.lines if found.get_markersize() == 2)
    assert len(points) == 300
    assert points[:, 1].max() == pytest.approx(0.05)


def test_stability_curves_draw_every_row_above_the_papers_form(known):
    secants = known.secants.loc[known.secants.index.repeat(20)].reset_index(drop=True)
    few = secants.index[secants["model"].str.contains("banded")][:4]
    secants.loc[few, "dispersion"] = 0.1  # e^0.1 / 3 = 0.368, and the sound constant is larger
    secants.loc[few, "weight_change"] = 0.38 * secants.loc[few, "score_change"]
    findings = Findings(known.replace(secants=secants))
    ax, _ = shown(registry.figures()["stability_curves"](findings))
    assert exceeding_pairs(findings)["paper"]["violated"] == 4
    assert "4 above the paper's form" in ax.get_title(loc="left") + words(ax.figure)
    (marked,) = [
        found.get_ydata() for found in ax.lines if found.get_markersize() == 4.5 and len(found.get_xdata())
    ]
    assert marked == pytest.approx([0.38] * 4)
    assert "above the paper's form" in legend(ax.figure)


def test_response_by_layer_marks_the_mean_of_every_model(known):
    figure = registry.figures()["attention_response"](Findings(known))
    (ax,) = shown(figure)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "response ‖p − p′‖₁ (at most 2)")
    text = words(figure)
    assert "full: mean 0.015" in text
    assert "top-k (k = 3): mean 0.045" in text
    means = {round(float(y), 6) for found in ax.lines for y in found.get_ydata() if len(found.get_ydata()) == 1}
    assert means == {0.01, 0.02, 0.03, 0.06}
    assert "noise 1 %" in text
    assert legend(figure) == ["full", "top-k (k = 3)", "banded (k = 3)", "block-local (k = 3)"]


def test_slopes_lie_below_constants_in_powers_of_ten(known):
    figure = registry.figures()["secants_under_bounds"](Findings(known))
    panels = shown(figure)
    assert len(panels) == 4
    for ax in panels:
        assert np.allclose(line(ax, "sound constant").get_ydata(), 6.0)
        assert np.allclose(line(ax, "paper's constant").get_ydata(), 8.0)
        drawn = [float(y) for found in ax.lines for y in np.atleast_1d(found.get_ydata())]
        assert pytest.approx(-2.0) in drawn
        assert pytest.approx(-3.0) in drawn
    assert panels[0].get_ylabel() == "slope or constant"
    figure.draw_without_rendering()
    assert "10⁸" in [label.get_text() for label in panels[0].get_yticklabels()]
    text = words(figure).replace("\n", " ")
    assert "point: holds, constants about 3.2 times the slope" in text
    assert "sound: vacuous, constants about 10⁸ times the slope" in text
    assert all(np.allclose(np.nanmax(line(ax, "bound at the point").get_ydata()), -1.5) for ax in panels)
    assert "paper: assumptions not all met" in text
    assert "the 5 evaluated inputs" in text
    assert "neither need be the larger" in text


def test_constants_that_are_not_numbers_leave_nothing_to_draw(known):
    columns = ["ln_sound", "ln_paper", "ln_local", "ln_point", "ln_gradient", "ln_secant"]
    broken = known.parameters.assign(**dict.fromkeys(columns, np.nan))
    with pytest.raises(NothingToDrawError, match="No constant"):
        registry.figures()["secants_under_bounds"](Findings(known.replace(parameters=broken)))


def test_plane_places_the_pair_and_the_papers_tasks(known):
    figure = registry.figures()["corollary_plane"](Findings(known))
    weight, inputs = shown(figure)
    assert (weight.get_xlabel(), weight.get_ylabel(), weight.get_yscale()) == ("δₕ / δₛ", "Δₕ / δₛ", "log")
    # KINDS: δ_h/δ_s = 1/4 at every percentile; Δ = 0.01, and δ_s is 8 at p100.
    drawn = [(float(a.get_xdata()[0]), float(a.get_ydata()[0])) for a in weight.lines if len(a.get_xdata()) == 1]
    assert any(point == pytest.approx((0.25, 0.01 / 8)) for point in drawn)
    assert any(point == pytest.approx((28.2 / 87.8, 1e-9 / 87.8)) for point in drawn)
    assert {"paper: ListOps", "paper: Parity", "paper: Even pairs", "paper: Missing duplicates"} <= set(
        legend(figure)
    )
    assert "even-pairs, topk-3, seed 7" in legend(figure)
    edge, height = line(weight, "boundary, δₛ = 10").get_data()
    assert edge + np.log(2 * (1 + 1 / (10 * height))) / 10 == pytest.approx(np.ones(len(edge)))
    assert any(found.get_label() == "boundary, δₛ = 10, β = 8" for found in inputs.lines)
    assert "a heuristic" in words(figure).replace("\n", " ")


def test_bars_stand_on_one_and_margins_on_zero(known):
    pairs, _ = find_pairs(known.models, attention=None)
    table = corollary_table(Findings(known), pairs)
    figure = registry.figures()["corollary_conditions"](Findings(known))
    panels = shown(figure)
    assert len(panels) == 2 * len(pairs) == 6
    own = table[(table["pair"] == "even-pairs, topk-3, seed 7") & (table["form"] == "paper")]
    ends = sorted(bar.get_y() + bar.get_height() for bar in panels[0].patches)
    assert ends == pytest.approx(sorted(own["value"]))
    assert {bar.get_y() for bar in panels[0].patches} == {1.0}
    assert {bar.get_y() for bar in panels[1].patches} == {0.0}
    assert [ax.get_ylabel() for ax in panels[:2]] == ["paper: left side", "sound: ln margin"]
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ["p75", "p90", "p95", "p100"]


def test_a_tie_is_said_and_not_drawn(known):
    queries = known.queries.copy()
    queries.loc[queries["model"].str.contains("topk") & (queries["sample"] == 0), "separation"] = 0.0
    tied = known.replace(queries=queries)
    assert "assumption not met at p90, p95, p100" in words(
        registry.figures()["corollary_conditions"](Findings(tied))
    )
    assert "3 with Δₕ ≤ 0 or a tie not shown" in words(registry.figures()["corollary_plane"](Findings(tied)))


def test_without_constants_the_sound_margin_in_x_is_not_known(known):
    figure = registry.figures()["corollary_conditions"](
        Findings(known.replace(constants=optional_tables()["constants"].empty()))
    )
    assert "X: not known (the norms were not measured)" in words(figure)


def test_several_noise_levels_are_panels_of_their_own(model, theory):
    both = Measurements.concat([model("full"), model("topk")])
    low, high = theory(both), theory(both, noise=0.1)
    joined = low.replace(secants=pd.concat([low.secants, high.secants], ignore_index=True))
    titles = [ax.get_title(loc="left") for ax in shown(registry.figures()["attention_response"](Findings(joined)))]
    assert titles == ["even-pairs, noise 1 %", "even-pairs, noise 10 %"]
