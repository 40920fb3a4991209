"""A model whose mask cannot represent its task says so."""

import torch

from semdiag.capturing.loading import load
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.measuring.table import OUT_OF_REACH
from semdiag.questions.learning import reach_claims
from semdiag_models import TrainingConfig, open_run, train_run


def test_a_block_local_model_of_even_pairs_says_that_it_cannot(tiny_config, tiny_runs, tmp_path):
    config = tiny_config("block", 2)
    training = TrainingConfig("even-pairs", tiny_runs.length, 1, 7, 50, 20)
    with torch.random.fork_rng():
        trainer = open_run(tmp_path / "b", config, training, torch.device("cpu"), resume=False, overwrite=False)
        train_run(tmp_path / "b", trainer, {"command": "made by the tests"})
    found = survey([load(tmp_path / "b"), load(tiny_runs.full)], Conditions(samples=5))
    remarks = found.remarks[found.remarks["text"] == OUT_OF_REACH]
    assert remarks["model"].tolist() == [str(tmp_path / "b")]
    (claim,) = reach_claims(Findings(found))
    assert (claim.id, claim.value) == ("out-of-reach", 1)
    assert "local blocks (k = 2)" in claim.sentence
