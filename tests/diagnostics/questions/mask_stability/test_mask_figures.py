"""Figures and words on masks under noise and on other k: what they show of numbers that are known."""

import itertools
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import mean_interval
from semdiag.measuring.measurements import Measurements
from semdiag.presenting.answer import sentences_of
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import MASK_STYLES
from semdiag.questions import registry
from semdiag.questions.k_sweep.changes import change_table
from semdiag.questions.mask_stability.answer import (
    heads_pooled,
    mask_table,
    masks_glance,
)
from semdiag.reporting.report import measured_questions, write_report

pytestmark = pytest.mark.usefixtures("few_resamples")

LEVELS = (0.01, 0.1)


def words(figure):
    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.fixture
def pair(model):
    """A full, a top-k and a banded model."""
    return Measurements.concat([model("full"), model("topk"), model("banded")])


@pytest.mark.slow
def test_agreement_is_drawn_against_layers_by_noise(pair, probed):
    figure = registry.figures()["masks_unchanged"](Findings(probed(pair)))
    full, topk = figure.axes
    assert "top-3 it would choose" in full.get_title(loc="left")
    assert (topk.get_title(loc="left"), topk.get_xlabel()) == ("even-pairs\ntop-k (k = 3)", "layer")
    lines = {line.get_label(): line for line in topk.get_lines()}
    for level, name in zip(LEVELS, ("noise 1%", "noise 10%"), strict=True):
        np.testing.assert_allclose(lines[name].get_xdata(), [0, 1])
        np.testing.assert_allclose(lines[name].get_ydata(), [1 - level, 1 - 2 * level], rtol=1e-6)
    said = " ".join(words(figure).split())
    assert "6 samples per model, 5 draws (seed 0)" in said
    assert "95% intervals" in said


@pytest.mark.slow
def test_at_one_noise_level_models_of_a_task_share_a_panel(pair, probed):
    figure = registry.figures()["masks_unchanged"](Findings(probed(pair, levels=(0.1,))))
    assert "Noise 10%. Heads pooled" in " ".join(words(figure).split())
    (ax,) = figure.axes
    lines = {line.get_label(): line for line in ax.get_lines() if line.get_marker() not in ("None", "")}
    assert set(lines) == {"full: top-3 it would choose", "top-k (k = 3)"}
    np.testing.assert_allclose(lines["top-k (k = 3)"].get_ydata(), [0.9, 0.8], rtol=1e-6)


@pytest.mark.slow
def test_every_model_without_a_mask_is_titled_so(pair, probed):
    found = probed(pair)
    models = found.models.assign(attention=found.models["attention"].replace("full", "causal"))
    titles = [
        ax.get_title(loc="left")
        for ax in registry.figures()["masks_unchanged"](Findings(found.replace(models=models))).axes
    ]
    assert ["top-3 it would choose" in title for title in titles].count(True) == 1


@pytest.mark.slow
def test_the_interval_of_a_layer_resamples_the_sequences_of_all_its_heads(pair, probed):
    """Its ends are those of the rows of all heads, not a mean of the heads' own ends."""
    found = probed(pair)
    drawn = np.random.default_rng(0).integers(6, size=len(found.masks)) / 5
    masks = found.masks.assign(exact=drawn.astype(np.float32), head=(found.masks["query"] % 2).astype(np.int32))
    found = Findings(found.replace(masks=masks))
    of_heads = found(mask_table)
    for row in found(heads_pooled).to_dict("records"):
        place = {name: row[name] for name in ("model", "level", "layer")}
        own, heads = (
            table[(table[[*place]] == pd.Series(place)).all(axis=1)]
            for table in (found.measurements.masks, of_heads)
        )
        assert row["exact_low"] != pytest.approx(heads["exact_low"].mean())
        share = mean_interval(own, "exact")
        assert (row["exact"], row["exact_low"], row["exact_high"]) == (share.estimate, share.low, share.high)
        assert row["exact"] == pytest.approx(own["exact"].mean(), rel=1e-6)
        assert row["certified"] == pytest.approx(own["certified"].mean(), rel=1e-6)
        assert row["exact_low"] < row["exact"] < row["exact_high"]


@pytest.mark.slow
def test_the_cost_is_drawn_with_interval_control_and_tolerance_and_each_kind_is_named(pair, probed, reruns):
    findings = Findings(reruns(probed(pair)))
    figure = registry.figures()["cost"](findings)
    table = findings(change_table)
    for ax, model in zip(figure.axes, table["model"].unique(), strict=True):
        assert ax.get_yscale() == "log"
        floor, _ = ax.get_ylim()
        lines = {line.get_gid(): line for line in ax.get_lines()}
        bands = {band.get_gid(): band for band in ax.collections}
        for kind in ("topk", "random"):
            own = table[(table["model"] == model) & (table["mask"] == kind) & (table["kept"] < 1)].sort_values(
                "kept"
            )
            np.testing.assert_allclose(lines[f"keys-{kind}--line"].get_xdata(), own["kept"])
            np.testing.assert_allclose(lines[f"keys-{kind}--line"].get_ydata(), own["change"].clip(lower=floor))
            corners = bands[f"keys-{kind}--band"].get_paths()[0].vertices
            assert corners[:, 1].max() == pytest.approx(own["high"].clip(lower=floor).max())
            hollow = [lines[f"keys-{kind}--point-{i}"].get_markerfacecolor() == "white" for i in range(len(own))]
            assert hollow == (own["change"] < floor).tolist()
        shaded = next(patch for patch in ax.patches if patch.get_alpha() == 0.1)
        assert shaded.get_y() + shaded.get_height() == pytest.approx(0.01)
        colors = {text.get_text(): text.get_color() for text in ax.texts}
        assert colors["top-k by head"] == MASK_STYLES["topk"].color
        assert {"random (control)", "within 0.01 nats"} <= set(colors)
        assert "nats" in ax.get_ylabel() or ax is not figure.axes[0]
    assert figure.tooltips["keys-topk--point-0"].startswith("top-k by head, k = 1, ")


@pytest.mark.slow
def test_names_at_the_ends_of_lines_keep_apart(pair, probed, reruns):
    for ax in registry.figures()["cost"](Findings(reruns(probed(pair)))).axes:
        places = sorted(text.xy[1] for text in ax.texts if text.get_gid())
        assert all(b - a > 0.07 for a, b in itertools.pairwise(places))
        assert places[0] >= 0
        assert places[-1] <= 1


@pytest.mark.parametrize("name", ["masks_unchanged", "cost"])
def test_fixed_masks_leave_nothing_to_draw(name, model, probed):
    with pytest.raises(NothingToDrawError):
        registry.figures()[name](Findings(probed(model("banded"))))


def said(findings):
    return sentences_of(registry.QUESTIONS["mask-stability"].answered(findings).details)


@pytest.mark.slow
def test_what_is_said_of_masks(pair, probed):
    lines = said(Findings(probed(pair)))
    assert lines[0].startswith("Noise on the embedded tokens, relative to each token's RMS; 6 samples")
    assert "the model selects no keys: this is the mask that top-3 would choose" in lines[1]
    assert sum("Certified rows that changed: 0 of" in line for line in lines) == 2
    assert any("25.00% of the predictions change" in line for line in lines)
    assert lines[-1].endswith("not applicable: the mask of banded attention does not depend on the input")
    (short,) = registry.QUESTIONS["mask-stability"].answered(Findings(probed(pair))).headline
    words = r"\d+% of the masks of 1 model stay the same under noise of 10%; \d+% of those that top-3 would choose"
    assert re.match(words, short.sentence)
    assert registry.QUESTIONS["mask-stability"].answered(Findings(pair)).headline == []


@pytest.mark.slow
def test_a_certified_row_that_changed_is_called_an_error(pair, probed):
    found = probed(pair)
    told = found.masks.index[found.masks["level"] == LEVELS[1]]  # the level that the first screen tells
    found.masks.loc[told[0], "certified_changed"] = 1
    assert "; 1 of " in masks_glance(Findings(found)).words
    assert "which is an error of semdiag" in " ".join(said(Findings(found)))
    assert registry.QUESTIONS["mask-stability"].json(Findings(found))["results"][0]["certified_changed"] == 1


@pytest.mark.slow
def test_certified_rows_are_those_of_the_noise_that_is_named(pair, probed):
    """Of another level there are other certified rows, of which the first screen counts none."""
    found = probed(pair)
    tile = masks_glance(Findings(found))
    others = [found.masks.assign(level=found.masks["level"] * factor, certified=1.0) for factor in (1e-3, 1e3)]
    both = found.replace(masks=pd.concat([*others, found.masks], ignore_index=True))
    assert masks_glance(Findings(both)) == tile


@pytest.mark.slow
def test_what_is_said_of_other_k(pair, probed):
    full, topk, banded = sentences_of(registry.QUESTIONS["k-sweep"].answered(Findings(probed(pair))).details)
    assert "inconclusive before it is run with masks: k = 6 keeps 100.0% of the weight" in full
    assert "trained with top-k attention, k = 3" in topk
    assert banded.endswith("inconclusive: its mask does not rank keys by their scores.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("range_of_full", "said"),
    [
        (1e3, "are met by k = 6 in 6 of 6 cases (W and X at p75, p90 and p95); most often by k = 1, in 6."),
        (1e-3, "are met by no measured k in any of 6 cases (W and X at p75, p90 and p95)."),
        (0.0, "have no value at any k: what they divide by, δ_s or Δ_h(k), is 0."),
    ],
)
def test_what_is_said_of_the_conditions_is_a_sentence(pair, probed, range_of_full, said):
    found = probed(pair)
    sweep = found.sweep.copy()
    percentiles = [name for name in sweep if re.fullmatch(r"p\d+", name)]
    sweep.loc[(sweep["quantity"] == "dispersion") & (sweep["k"] == 0), percentiles] = range_of_full
    full = registry.QUESTIONS["k-sweep"].answered(Findings(found.replace(sweep=sweep))).details[0]
    assert full.sentence.endswith(f"The paper's conditions of Corollary 1 {said}")


@pytest.mark.slow
def test_tables_and_sections(pair, probed, tmp_path):
    found = probed(pair)
    assert measured_questions(Findings(pair))[-1] not in ("mask-stability", "k-sweep")
    assert measured_questions(Findings(found))[-2:] == ["mask-stability", "k-sweep"]
    findings = Findings(found)
    tables = (
        registry.QUESTIONS["mask-stability"].answered(findings).tables
        | registry.QUESTIONS["k-sweep"].answered(findings).tables
    )
    assert set(tables) == {"mask_stability", "noise_effects", "k_sweep", "k_sweep_conditions"}
    assert tables["k_sweep"]["swept_k"].max() == 6
    both = ["mask-stability", "k-sweep"]
    page, _ = write_report(Findings(found), tmp_path / "report", "x", (), keep_queries=True, sections=both)
    text = page.read_text(encoding="utf-8")
    assert "Do masks survive noise?" in text
    assert "What would sparse attention cost this model?" in text
    again = Measurements.load(tmp_path / "report" / "data")
    assert said(Findings(again)) == said(Findings(found))
    assert (
        registry.QUESTIONS["k-sweep"].answered(Findings(again)).details
        == registry.QUESTIONS["k-sweep"].answered(Findings(found)).details
    )
