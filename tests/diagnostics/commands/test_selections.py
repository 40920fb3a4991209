"""``semdiag selections``: exit codes, what it prints, what it refuses."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag import check_selection

SCORES = np.array([[3.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 2.0]], np.float32)
RIGHT, WRONG = np.array([[0, 2], [0, 3]]), np.array([[0, 2], [0, 1]])


@pytest.fixture
def write(here):
    """Call with a file's name and arrays: writes them."""

    def make(name, **arrays):
        if name.endswith(".parquet"):
            pd.DataFrame({key: list(value) for key, value in arrays.items()}).to_parquet(name)
        else:
            np.savez(name, **arrays)
        return name

    return make


@pytest.mark.parametrize("kind", ["npz", "parquet"])
@pytest.mark.parametrize(("indices", "code"), [(RIGHT, 0), (WRONG, 1)])
def test_the_exit_code_says_whether_a_row_is_faulty(run_semdiag, write, kind, indices, code):
    outcome = run_semdiag("selections", write(f"a.{kind}", scores=SCORES, indices=indices), "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (code, "", "")


def test_it_prints_the_counts_and_the_worst_row(run_semdiag, write):
    outcome = run_semdiag("selections", write("a.npz", scores=SCORES, indices=WRONG))
    assert outcome.code == 1
    words = " ".join(outcome.err.split())
    assert "a.npz: 2 rows of 4 keys, k = 2, scores of float32" in words
    assert "exact the only top-k 1 0 1 4194304" in words  # a last place of 2 is 2^-22
    assert "wrong a key left out is larger 1 1 -1 -4194304" in words
    assert "Worst: row 1, wrong: worst chosen score 1, k-th score 2, gap 1" in words
    assert "1 of 2 rows is faulty." in words


def test_json_keeps_the_promise_and_says_what_python_says(run_semdiag, write):
    outcome = run_semdiag("selections", write("a.npz", scores=SCORES, indices=WRONG), "--json", "--format", "bf16")
    assert outcome.code == 1
    said = json.loads(outcome.out)
    assert said["schema"] == "semdiag.selections/2"
    assert said["provenance"]["command"] == ["semdiag", "selections", "a.npz", "--json", "--format", "bf16"]
    (entry,) = said["results"]
    found = check_selection(SCORES, WRONG, format="bfloat16")
    assert entry["counts"] == found.counts
    assert (entry["file"], entry["rows"], entry["k"], entry["keys"]) == ("a.npz", 2, 2, 4)
    assert (entry["faults"], entry["passed"], entry["format"]) == (1, False, "bfloat16")
    assert entry["worst"] == entry["worst_of_class"]["wrong"]
    assert (entry["worst"]["row"], entry["worst"]["worst_chosen"], entry["worst"]["kth"]) == ([1], 1.0, 2.0)
    assert set(entry["worst_of_class"]) == {"exact", "wrong"}


def test_lengths_starts_and_the_causal_rule_reach_the_check(run_semdiag, write):
    scores = np.arange(32, dtype=np.float32).reshape(2, 4, 4)
    indices = np.array([[[0], [1], [2], [3]], [[-1], [-1], [2], [3]]])
    arrays = {"scores": scores, "indices": indices, "lengths": np.array([4, 2]), "starts": np.array([0, 2])}
    outcome = run_semdiag("selections", write("a.npz", **arrays), "--causal")
    assert outcome.code == 0, outcome.err
    assert "Not checked: 2 rows of padded queries." in outcome.err
    arrays["starts"] = np.array([0, 1])
    assert run_semdiag("selections", write("b.npz", **arrays), "--causal").code == 1
    documents = {"scores": scores[0], "indices": np.arange(4)[:, None], "documents": np.array([0, 0, 1, 1])}
    assert run_semdiag("selections", write("c.npz", **documents), "--causal").code == 0


def test_without_scores_the_keys_alone_are_judged(run_semdiag, write):
    outcome = run_semdiag("selections", write("a.npz", indices=RIGHT), "--keys", 3)
    assert outcome.code == 1
    assert "an index that is no key" in outcome.err
    outcome = run_semdiag("selections", "a.npz")
    assert outcome.code == 0
    assert "no fault in the keys, scores unknown" in outcome.err


def test_routed_experts_are_indices(run_semdiag, write):
    assert run_semdiag("selections", write("a.npz", routed_experts=RIGHT, scores=SCORES), "--quiet").code == 0


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({"scores": SCORES}, (), "holds no array of chosen keys"),
        ({"indices": RIGHT, "topk_ids": RIGHT}, (), "holds indices and topk_ids"),
        ({"indices": RIGHT, "scores": SCORES[:1]}, (), "of the same rows"),
        ({"indices": RIGHT.astype(float), "scores": SCORES}, (), "indices must be whole numbers"),
        ({"indices": RIGHT, "scores": RIGHT}, (), "are scores and indices swapped"),
        ({"indices": RIGHT, "scores": SCORES[:, :1]}, (), "k = 2 keys, but there are only 1"),
        ({"indices": RIGHT, "scores": SCORES * np.nan}, (), "hold NaN"),
        ({"indices": RIGHT, "scores": SCORES, "lengths": [9, 9]}, (), "are the scores those of the same tokens"),
        ({"indices": RIGHT, "scores": SCORES}, ("--format", "int8"), "Unknown number format 'int8'"),
        ({"indices": RIGHT, "scores": SCORES}, ("--keys", 5), "keys = 5, but the scores have 4"),
        ({"indices": RIGHT}, ("--keys", 0), "keys must be at least 1"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(refusal, write, arrays, options, said):
    line = refusal("selections", write("a.npz", **arrays), *options, "--json")
    assert said in line
    assert "a.npz" in line


def test_a_missing_file_and_another_kind(refusal, here):
    assert refusal("selections", "none.npz") == "none.npz does not exist."
    assert "Arrays come as .npz" in refusal("selections", "none.txt")


@pytest.mark.device
def test_on_another_device_a_selection_is_what_it_is_on_the_cpu(other_device):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, 20, generator=generator)
    indices = torch.randint(-1, 20, (3, 4, 5), generator=generator)
    lengths = torch.tensor([20, 18, 3])
    here = check_selection(scores, indices, lengths)
    there = check_selection(*(tensor.to(other_device) for tensor in (scores, indices, lengths)))
    assert there.rows.equals(here.rows)
