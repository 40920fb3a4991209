"""Figures and words on training runs: what they show of hand-made runs, censored ones included."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.schema import optional_tables
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.questions import registry
from semdiag.questions.convergence.words import (
    convergence_in_short,
    convergence_sentences,
    interval_words,
    speed_words,
)
from semdiag.questions.predictors.answer.mask_cells import STAGES
from semdiag.questions.predictors.words import predictor_sentences

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture(scope="module")
def runs(model):
    """Even pairs, three seeds: full arrives at epoch 4, top-k at 2; block never does."""
    kinds = [(kind, seed) for seed in (7, 8, 9) for kind in ("full", "topk", "block")]
    made = Measurements.concat([model(kind, seed=seed, epochs=6) for kind, seed in kinds])
    setting, rows, history = json.dumps({"task": "even-pairs"}), [], made.history.copy()
    for row in made.models.to_dict("records"):
        label = row["attention"] if row["attention"] == "full" else f"{row['attention']}-3"
        facts = (row["model"], "even-pairs", label, row["attention"], row["seed"], setting, 6, 6, "finished")
        rows.append(facts)
        if row["attention"] == "block":
            history.loc[history["model"] == row["model"], "train_accuracy"] = 0.5
    table = optional_tables()["runs"].of_rows(
        dict(zip(optional_tables()["runs"].columns, row, strict=True)) for row in rows
    )
    return made.replace({**made.provenance, "target": 0.95}, runs=table, history=history)


def points(ax):
    """Markers without a line: (x, y, filled)."""
    return [
        (float(x), float(y), line.get_markerfacecolor() != "white")
        for line in ax.lines if line.get_linestyle() == "None"
        for x, y in zip(np.atleast_1d(line.get_xdata()), np.atleast_1d(line.get_ydata()), strict=True)
    ]  # fmt: skip


def words(figure):
    return " ".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


def test_learning_curves_have_a_band_over_seeds_and_mark_arrivals(runs):
    figure = registry.figures()["learning_curves"](Findings(runs))
    (ax,) = [a for a in figure.axes if a.get_visible()]
    assert len(ax.collections) == 3  # one band per attention
    assert sorted(x for x, y, _ in points(ax) if y == 0.95) == [2, 2, 2, 4, 4, 4]
    assert "block-3: not in 6, not in 6, not in 6" in words(figure)


def test_a_censored_speed_up_is_a_hollow_point_with_an_arrow(runs):
    figure = registry.figures()["speed_up"](Findings(runs))
    (ax,) = figure.axes
    drawn = points(ax)
    assert sorted(y for _, y, filled in drawn if filled) == [2.0, 2.0, 2.0]
    assert [y for _, y, filled in drawn if not filled] == pytest.approx([4 / 6] * 3)
    arrows = [text for text in ax.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 3
    assert all(arrow.xy[1] < arrow.get_position()[1] for arrow in arrows)  # downwards: the truth is smaller
    assert "75%" in words(figure)


def test_one_seed_of_two_attentions_is_drawn_as_two_speed_ups(runs):
    """Fails where a single seed of an attention empties the whole figure."""
    figure = registry.figures()["speed_up"](Findings(runs.replace(runs=runs.runs[runs.runs["seed"] == 7])))
    (ax,) = figure.axes
    assert sorted((y, filled) for _, y, filled in points(ax)) == [(pytest.approx(4 / 6), False), (2.0, True)]


def test_speed_up_against_dispersion_stands_at_the_ratio_of_medians(runs):
    figure = registry.figures()["speed_up_against_dispersion"](Findings(runs))
    (ax,) = figure.axes
    assert sorted({round(x, 6) for x, _, _ in points(ax)}) == [0.25, 0.625]  # factors 1 and 2.5 over 4


def numbers(runs, name, places, quantities):
    rows = [
        (*(model, *place), quantity, statistic, value)
        for model in runs.runs["model"] for place in places for quantity, statistic, value in quantities
    ]  # fmt: skip
    return optional_tables()[name].of_rows(
        dict(zip(optional_tables()[name].columns, row, strict=True)) for row in rows
    )


def test_other_lengths_are_drawn_with_their_intervals(runs):
    quantities = [("accuracy", s, v) for s, v in (("value", 0.7), ("low", 0.6), ("high", 0.9))]
    quantities += [("dispersion", "p50", 2.0), ("separation", "p50", math.nan)]
    table = numbers(runs, "lengths", [(length, -1, 30) for length in (6, 8, 16)], quantities)
    figure = registry.figures()["length_generalisation"](Findings(runs.replace(lengths=table)))
    accuracy, _, separation = figure.axes[:3]
    assert list(accuracy.get_xticks()) == [6, 8, 16]
    bar = accuracy.collections[0].get_segments()[0]
    assert [y for _, y in bar] == pytest.approx([0.6, 0.9])
    assert "no key is dropped" in [text.get_text() for text in separation.texts]


def test_numbers_along_training_stand_at_their_epochs(runs):
    table = numbers(runs, "along", [(0, -1), (6, -1)], [("dispersion", "p50", 2.0), ("gamma", "max", 0.1)])
    figure = registry.figures()["along_training"](Findings(runs.replace(along=table)))
    assert list(figure.axes[0].lines[0].get_xdata()) == [0, 6]
    assert "nothing to show" in words(figure)


def test_numbers_within_a_decade_or_two_have_labels_to_read_them_by(runs):
    quantities = [("dispersion", "p50", 2.3), ("response", "mean", 0.016)]
    table = numbers(runs, "along", [(0, -1), (6, -1)], quantities)
    late = table["epoch"] == 6
    table.loc[late & (table["quantity"] == "response"), "value"] = 0.022
    table.loc[late & (table["quantity"] == "dispersion"), "value"] = 41.0
    figure = registry.figures()["along_training"](Findings(runs.replace(along=table)))
    figure.draw_without_rendering()
    for ax in figure.axes[:2]:
        low, high = ax.get_ylim()
        ticks = zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
        assert sum(low <= place <= high and bool(label.get_text()) for place, label in ticks) >= 2


def test_words_say_bounds_and_confidence(runs):
    (short,) = convergence_in_short(Findings(runs))
    assert ": topk-3 needs the fewest epochs to 95% training accuracy: topk-3 2, 2, 2; " in short
    assert short.endswith("; block-3 not in 6, not in 6, not in 6.")
    said = convergence_sentences(Findings(runs))
    assert "block-3 not in 6, not in 6, not in 6 (median speed-up over 3 seeds below 0.667" in said[0]
    assert "topk-3 2, 2, 2 (median speed-up over 3 seeds 2; one epoch off 1 to 5; 2 to 2 (75%))" in said[0]
    assert speed_words(5, math.inf) == "above 5"
    assert speed_words(0, math.inf) == "unknown"
    assert interval_words({"pairs": 1}) == "one seed: no interval"


@pytest.fixture(scope="module")
def predicted():
    """Six masks of one task: the response falls with the speed, the entropy is the same everywhere."""
    masks = ("full", "topk-5", "banded-5", "block-5", "bottomk-5", "random-5")
    runs, history, predictors = [], [], []
    for n, mask in enumerate(masks):
        facts = (mask, "made", mask, mask.split("-")[0], 1, json.dumps({"task": "made"}), 2, 2, "finished")
        runs.append(dict(zip(optional_tables()["runs"].columns, facts, strict=True)))
        history += [
            {"model": mask, "epoch": epoch, "train_loss": loss, "train_accuracy": 0.5, "holdout_accuracy": 0.5}
            for epoch, loss in ((1, 1.0), (2, 1 - 0.1 * n))
        ]
        predictors += [
            {"model": mask, "epoch": epoch, "candidate": name, "ln_value": -float(n) * (name == "response")}
            for epoch in (0, 2) for name in ("response", "entropy")
        ]  # fmt: skip
    none = pd.DataFrame({"model": []})
    tables = {
        name: optional_tables()[name].of_rows(rows) for name, rows in (("runs", runs), ("predictors", predictors))
    }
    return Findings(Measurements(none, none, none, pd.DataFrame(history), none, {"target": 0.95}, **tables))


def test_correlations_stand_at_their_rho(predicted):
    figure = registry.figures()["predictors"](predicted)
    assert [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes] == [*STAGES]
    drawn = points(figure.axes[0])
    assert [(x, filled) for x, y, filled in drawn if y == 0] == [(pytest.approx(1), True)]  # p = 2 / 720
    assert {x for x, y, _ in drawn if y != 0} == {0}
    assert "4 correlations" in words(figure)


def test_every_mask_stands_at_its_ranks(predicted):
    figure = registry.figures()["predictor_cells"](predicted)
    ax = figure.axes[0]
    found = sorted(tuple(line.get_xydata()[0]) for line in ax.lines)
    assert found == [(pytest.approx(n / 5), pytest.approx(n / 5)) for n in range(6)]


def test_words_on_predictors_say_what_remains_and_of_how_many(predicted):
    found, strongest, *_ = predictor_sentences(predicted)
    assert found.startswith(
        "Of 4 rank correlations with the log area under the training-loss curve (2 candidates, 2 stages) within 1 "
        "task, over 6 cells of task × mask (0 left out,"
    )
    assert "2 are below p = 0.05 after correction" in found
    assert "(720 ways that differ, 720 tried: no p-value is below 0.0014)" in found
    assert found.endswith(
        "No interval: fewer than 8 masks, or tasks of so unlike numbers of them that resamples lose some."
    )
    assert strongest.startswith("Strongest: response to 1% noise, initialisation: ρ = 1.00, p = 0.0028, corrected")


def test_words_on_predictors_say_why_nothing_is_known(predicted):
    """Six masks of which all is known never arrive; four are too few."""
    measured, parity = predicted.measurements, json.dumps({"task": "parity", "length": 8, "listops": None})
    never = predictor_sentences(Findings(measured.replace(runs=measured.runs.assign(setting=parity))))[-1]
    assert never.endswith("is unknown: in no task do 5 known masks differ in it.")
    few = predictor_sentences(Findings(measured.replace(runs=measured.runs[:4])))
    assert [words.endswith("no task has 5 masks of which all is known.") for words in few] == [True, True]


def test_without_predictors_there_is_nothing_to_draw(runs):
    for name in ("predictors", "predictor_cells"):
        with pytest.raises(NothingToDrawError):
            registry.figures()[name](Findings(runs))
    assert "unknown" in predictor_sentences(Findings(runs))[0]


def test_a_run_that_stopped_keeps_its_accuracy_in_the_band(runs):
    history = runs.history
    stopped = (history["model"] == runs.runs.query("kind == 'topk'")["model"].iloc[0]) & (history["epoch"] > 3)
    figure = registry.figures()["learning_curves"](Findings(runs.replace(history=history[~stopped])))
    (ax,) = [a for a in figure.axes if a.get_visible()]
    assert all(collection.get_paths()[0].vertices[:, 0].max() == 6 for collection in ax.collections)
