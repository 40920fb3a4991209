"""The median dispersion before training, for the headline of a report about pairs."""

import pytest

from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.dispersion.measure import InitialisationPlan


@pytest.mark.slow
def test_it_is_the_median_of_the_first_file_of_the_run_on_the_same_samples(tiny_runs):
    runs = [tiny_runs.full, tiny_runs.topk]
    found = survey(runs, Conditions(samples=6, plans=(InitialisationPlan(samples=4),))).initialisation
    alone = [survey([run / "epoch-0.pt"], Conditions(samples=4)).queries["dispersion"].median() for run in runs]
    assert found["samples"].tolist() == [4, 4]
    assert found["dispersion"].tolist() == pytest.approx(alone, rel=1e-12)
    assert alone[1] < alone[0]


def test_an_initialisation_itself_has_none(tiny_runs):
    found = survey([tiny_runs.full / "epoch-0.pt"], Conditions(samples=6, plans=(InitialisationPlan(),)))
    assert "initialisation" not in found
