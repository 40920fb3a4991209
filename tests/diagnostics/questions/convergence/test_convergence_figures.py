"""Figures and words on training runs: what they show of hand-made runs, censored ones included."""

import json
import math

import numpy as np
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.probe import optional_tables
from semdiag.questions import registry
from semdiag.questions.convergence.answer import (
    convergence_in_short,
    speed_interval,
    speed_words,
)

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


def test_words_say_bounds_and_confidence(runs):
    first, others = convergence_in_short(Findings(runs))
    assert first.endswith(
        ": topk-3 needs the fewest epochs to 95% training accuracy: topk-3 2, 2, 2 (speed-up 2; 2 to 2 (75%))."
    )
    assert "; block-3 not in 6, not in 6, not in 6 (speed-up below 0.667; " in others
    assert speed_words(5, math.inf) == "above 5"
    assert speed_words(0, math.inf) == "unknown"
    assert speed_interval({"pairs": 1}) == "one seed: no interval"


def test_a_run_that_stopped_keeps_its_accuracy_in_the_band(runs):
    history = runs.history
    stopped = (history["model"] == runs.runs.query("kind == 'topk'")["model"].iloc[0]) & (history["epoch"] > 3)
    figure = registry.figures()["learning_curves"](Findings(runs.replace(history=history[~stopped])))
    (ax,) = [a for a in figure.axes if a.get_visible()]
    assert all(collection.get_paths()[0].vertices[:, 0].max() == 6 for collection in ax.collections)
