"""Options that are given twice: lists are joined, any other is refused."""

import json

import pytest


@pytest.mark.slow
def test_lists_take_commas_and_repetition_alike(run_semdiag, here, tiny_runs):
    def ks(*said):
        out = "--figures", "none", "--out", here / "out", "--json", "--quiet", "--samples", 10
        outcome = run_semdiag("k-sweep", tiny_runs.full, "--rerun", *said, *out)
        return {row["k"] for row in json.loads(outcome.out)["results"][0]["rerun"]} - {0}

    assert ks("--k", "2", "--k", "3,4") == ks("--k", "2,3,4") == {2, 3, 4}


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (("--samples", 8, "--samples", 4), "--samples"),
        (("--inputs", "a.txt", "--inputs=b.txt"), "--inputs"),
        (("--seed", 1, "--seed", 1), "--seed"),
    ],
)
def test_any_other_option_given_twice_is_refused(run_semdiag, here, tiny_runs, said, name):
    outcome = run_semdiag("k-sweep", tiny_runs.full, *said)
    assert outcome.code == 2
    assert f"{name} is given 2 times, and takes one value." in outcome.err
    assert not (here / "reports").exists()
