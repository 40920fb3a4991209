"""Figures and words on training runs: what they show of hand-made runs, censored ones included."""

import json
import math

import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.presenting.answer import sentences_of
from semdiag.questions import registry
from semdiag.questions.convergence.answer import (
    convergence_claims,
    speed_interval,
    speed_words,
)
from semdiag.questions.registry import tables as declared_tables

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
    table = declared_tables()["runs"].of_rows(
        dict(zip(declared_tables()["runs"].columns, row, strict=True)) for row in rows
    )
    return made.replace({**made.provenance, "target": 0.95}, runs=table, history=history)


@pytest.mark.slow
def test_the_curves_of_each_seed_mark_the_arrivals_at_the_target(runs):
    figure = registry.figures()["training_curves"](Findings(runs))
    first = [ax for ax in figure.axes if ax.get_visible()][::2]  # with held-out accuracy
    assert len(first) == 3  # seeds
    assert all([text.get_text() for text in ax.texts] == ["2", "4"] for ax in first)
    half = runs.replace({**runs.provenance, "target": 0.5})
    figure = registry.figures()["training_curves"](Findings(half))
    assert any(line.get_xydata().tolist() == [[1, 0.5]] for line in figure.axes[0].lines)  # block has it at once


@pytest.mark.slow
def test_of_many_seeds_the_first_are_drawn_and_that_is_said(model):
    many = Measurements.concat([model("full", seed=seed, epochs=2) for seed in range(13)])
    figure = registry.figures()["training_curves"](Findings(many))
    assert len(figure.axes) == 3 * 12
    assert "The first 12 of 13 tasks and seeds" in " ".join(figure.get_supxlabel().split())


@pytest.mark.slow
def test_words_say_bounds_and_confidence(runs):
    first, others = sentences_of(convergence_claims(Findings(runs)))
    assert first.endswith(
        ": topk-3 needs the fewest epochs to 95% training accuracy: topk-3 2, 2, 2 (speed-up 2; 2 to 2 (75%))."
    )
    assert "; block-3 not in 6, not in 6, not in 6 (speed-up below 0.667; " in others
    assert speed_words(5, math.inf) == "above 5"
    assert speed_words(0, math.inf) == "unknown"
    assert speed_interval({"pairs": 1}) == "one seed: no interval"
