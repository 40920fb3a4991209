"""The figures of the theory: what they show of tables with known numbers."""

import matplotlib
import numpy as np
import pytest

from semdiag.mathematics.softmax_stability import fixed_mask_stability
from semdiag.measuring.findings.findings import Findings, find_pairs
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.questions import registry
from semdiag.questions.bounds.corollary import corollary_table
from semdiag.questions.registry import tables as declared_tables
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


def test_nothing_is_drawn_without_a_pair(model, theory):
    with pytest.raises(NothingToDrawError, match="compared with a full one"):
        registry.figures()["corollary_conditions"](Findings(theory(model("topk"))))


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


@pytest.mark.slow
def test_cells_count_the_pairs_that_meet_a_condition(known):
    pairs, _ = find_pairs(known.models, attention=None)
    table = corollary_table(Findings(known), pairs)
    panels = shown(registry.figures()["corollary_conditions"](Findings(known)))
    names = [tick.get_text() for tick in panels[0].get_yticklabels()]
    assert names == [f"{kind}, {name}" for kind in ("top-k", "banded", "local blocks") for name in "WX"]
    for ax, form, limit in zip(panels, ("paper", "sound"), (1.0, 0.0), strict=True):
        written = np.reshape([text.get_text() for text in ax.texts], (6, 4))
        of_form = table[table["form"] == form]
        cases = [v for v in of_form["value"] if abs(v - limit) >= 1e-12]
        end = f"met in {sum(v < limit for v in cases)} of {len(cases)} cases"
        assert " ".join(ax.get_title(loc="left").split()).endswith(end)
        for name, numbers, colours in zip(names, written, ax.images[0].get_array(), strict=True):
            kind, _, condition = name.rpartition(", ")
            word = {"top-k": "topk", "local blocks": "block"}.get(kind, kind)
            own = of_form[of_form["pair"].str.contains(f", {word}-") & (of_form["parameter"] == condition)]
            for percentile, number, colour in zip((75, 90, 95, 100), numbers, colours, strict=True):
                values = own.loc[own["percentile"] == percentile, "value"]
                decided = [v for v in values if abs(v - limit) >= 1e-12]
                met = sum(v < limit for v in decided)
                assert number == (f"{met} of {len(decided)}" if decided else "–")
                assert colour == (0 if not decided else 1 if not met else 2 if met < len(decided) else 3)
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ["p75", "p90", "p95", "p100"]


def cells(measurements, name):
    paper, sound = shown(registry.figures()["corollary_conditions"](Findings(measurements)))
    rows = [tick.get_text() for tick in paper.get_yticklabels()]
    return [np.reshape([text.get_text() for text in ax.texts], (-1, 4))[rows.index(name)] for ax in (paper, sound)]


@pytest.mark.slow
def test_a_tie_has_no_number(known):
    queries = known.queries.copy()
    queries.loc[queries["model"].str.contains("topk") & (queries["sample"] == 0), "separation"] = 0.0
    paper, _ = cells(known.replace(queries=queries), "top-k, W")
    assert [number == "–" for number in paper] == [False, True, True, True]


@pytest.mark.slow
def test_without_constants_the_sound_margin_in_x_is_not_known(known):
    without = known.replace(constants=declared_tables()["constants"].empty())
    _, sound = cells(without, "top-k, X")
    assert set(sound) == {"–"}
