"""``semdiag selections``: exit codes, what it prints, what it refuses."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag import check_selection
from semdiag.mathematics.block_formats import quantised

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
    words = " ".join(outcome.out.split())
    assert "a.npz: 2 rows of 4 keys, k = 2, scores of float32" in words
    assert "exact the only top-k 1 0 1 4194304" in words  # a last place of 2 is 2^-22
    assert "wrong a key left out is larger 1 1 -1 -4194304" in words
    assert "Worst: row 1, wrong: worst chosen score 1, k-th score 2, gap 1" in words
    assert "1 of 2 rows is faulty." in words


def test_a_choice_is_judged_by_q_and_k_in_a_format_with_scales(run_semdiag, refusal, write):
    draws = np.random.default_rng(0)
    q, k = draws.standard_normal((30, 32), np.float32), draws.standard_normal((20, 32), np.float32)
    rounded = [quantised(torch.from_numpy(each), "mxfp4") for each in (q, k)]
    file = write("a.npz", q=q, k=k, indices=(rounded[0] @ rounded[1].mT).topk(4).indices.numpy())
    right = run_semdiag("selections", file, "--format", "mxfp4")
    assert (right.code, "q and k in mxfp4" in right.out, "last place of float32" in right.out) == (0, True, True)
    assert run_semdiag("selections", file, "--quiet").code == 1
    assert "one file" in refusal("selections", file, file, "--format", "mxfp4")
    assert "both q and k" in refusal(
        "selections", write("b.npz", scores=SCORES, indices=RIGHT), "--format", "mxfp4"
    )


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


def test_every_faulty_row_is_listed(run_semdiag, refusal, write):
    scores = np.random.default_rng(0).random((40, 3, 8), np.float32)
    indices = np.argsort(-scores, -1)[..., :2]
    indices[5, 1], indices[7, 0] = indices[5, 1, [0, 0]], np.argsort(scores[7, 0])[:2]
    outcome = run_semdiag("selections", write("a.npz", scores=scores, indices=indices), "--rows", "rows.csv")
    assert (outcome.code, "Written: rows.csv, 2 rows" in outcome.err) == (1, True)
    table = pd.read_csv("rows.csv")
    assert table[["dim_0", "dim_1", "class"]].values.tolist() == [[5, 1, "duplicate"], [7, 0, "wrong"]]
    right = write("b.npz", scores=scores, indices=np.argsort(-scores, -1)[..., :2])
    run_semdiag("selections", right, "a.npz", "--rows", "rows.csv")
    table = pd.read_csv("rows.csv")
    assert table[["token", "layer", "class"]].values.tolist() == [[5, 1, "bug"], [7, 0, "bug"]]
    assert run_semdiag("selections", right, "--rows", "rows.csv", "--quiet").code == 0
    assert pd.read_csv("rows.csv").empty
    assert "--rows takes a file name that ends in .csv" in refusal("selections", right, "--rows", "rows.txt")
    assert "there is no folder" in refusal("selections", right, "--rows", "none/rows.csv")


@pytest.mark.parametrize("late", [1, 2])
def test_a_choice_of_the_row_before_is_stale(run_semdiag, write, late):
    scores = np.random.default_rng(0).random((40, 3, 16), np.float32)
    indices = np.argsort(-scores, -1)[..., :4]
    if late == 1:  # each call returns the choice of the one before
        indices[1:] = indices[:-1].copy()
    else:  # the first choice is never replaced
        indices[:] = indices[:1]
    outcome = run_semdiag("selections", write("a.npz", scores=scores, indices=indices), "--json")
    (entry,) = json.loads(outcome.out)["results"]
    assert (entry["faults"], entry["stale"]) == (117, 117)
    assert "117 of 117 faulty rows choose as the row before did, or should have: a stale choice?" in outcome.err
    indices = np.argsort(scores, -1)[..., :4]  # wrong, but not stale
    outcome = run_semdiag("selections", write("b.npz", scores=scores, indices=indices), "--json")
    assert json.loads(outcome.out)["results"][0]["stale"] <= 1, "by chance"
    assert "stale" not in outcome.err


def test_lengths_starts_and_the_causal_rule_reach_the_check(run_semdiag, write):
    scores = np.arange(32, dtype=np.float32).reshape(2, 4, 4)
    indices = np.array([[[0], [1], [2], [3]], [[-1], [-1], [2], [3]]])
    arrays = {"scores": scores, "indices": indices, "lengths": np.array([4, 2]), "starts": np.array([0, 2])}
    outcome = run_semdiag("selections", write("a.npz", **arrays), "--causal")
    assert outcome.code == 0, outcome.err
    assert "Not checked: 2 rows of padded queries." in outcome.out
    arrays["starts"] = np.array([0, 1])
    assert run_semdiag("selections", write("b.npz", **arrays), "--causal").code == 1
    documents = {"scores": scores[0], "indices": np.arange(4)[:, None], "documents": np.array([0, 0, 1, 1])}
    assert run_semdiag("selections", write("c.npz", **documents), "--causal").code == 0


def test_without_scores_the_keys_alone_are_judged(run_semdiag, write):
    outcome = run_semdiag("selections", write("a.npz", indices=RIGHT), "--keys", 3)
    assert outcome.code == 1
    assert "an index that is no key" in outcome.out
    outcome = run_semdiag("selections", "a.npz")
    assert outcome.code == 0
    assert "no fault in the keys, scores unknown" in outcome.out


def test_routed_experts_are_indices(run_semdiag, write):
    assert run_semdiag("selections", write("a.npz", routed_experts=RIGHT, scores=SCORES), "--quiet").code == 0


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({"scores": SCORES}, (), "holds no array of chosen keys"),
        ({"indices": RIGHT, "topk_ids": RIGHT}, (), "holds indices and topk_ids: which are the indices"),
        ({"indices": RIGHT, "scores": SCORES[:1]}, (), "of the same rows"),
        ({"indices": RIGHT.astype(float), "scores": SCORES}, (), "indices must be whole numbers"),
        ({"indices": RIGHT, "scores": RIGHT}, (), "are scores and indices swapped"),
        ({"indices": RIGHT, "scores": SCORES[:, :1]}, (), "k = 2 keys, but there are only 1"),
        ({"indices": RIGHT, "scores": SCORES * np.nan}, (), "hold NaN"),
        ({"indices": RIGHT, "scores": SCORES, "lengths": [9, 9]}, (), "do the scores belong to the same tokens"),
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
    assert "Arrays must be in .npz" in refusal("selections", "none.txt")


@pytest.mark.device
def test_on_another_device_a_selection_is_what_it_is_on_the_cpu(other_device):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, 20, generator=generator)
    indices = torch.randint(-1, 20, (3, 4, 5), generator=generator)
    lengths = torch.tensor([20, 18, 3])
    here = check_selection(scores, indices, lengths)
    there = check_selection(*(tensor.to(other_device) for tensor in (scores, indices, lengths)))
    assert there.rows.equals(here.rows)


# Two files

TRAINING = np.array([[[0, 1]], [[2, 1]], [[3, 0]]])
LOGITS = np.array([[[4, 3, 2, 1]], [[0, 3, 4, 1]], [[3, 2, 1, 4]]], np.float32)


def test_two_files_that_choose_alike_end_with_0(run_semdiag, write):
    first = write("a.npz", routed_experts=TRAINING, scores=LOGITS)
    outcome = run_semdiag("selections", first, write("b.npz", indices=TRAINING[..., ::-1]))
    assert outcome.code == 0, outcome.err
    words = " ".join(outcome.out.split())
    assert "a.npz and b.npz: 3 tokens × 1 layer, k = 2, scores of float32" in words
    assert "The keys of all 3 rows are the same." in words


def test_two_files_with_a_difference_end_with_1_and_say_what_it_is(run_semdiag, write):
    other = TRAINING.copy()
    other[1, 0, 1] = 3
    first, second = write("a.npz", indices=TRAINING, scores=LOGITS), write("b.npz", indices=other, scores=LOGITS)
    outcome = run_semdiag("selections", first, second, "--json")
    assert outcome.code == 1
    said = json.loads(outcome.out)
    assert said["schema"] == "semdiag.selections/2"
    assert isinstance(said["provenance"]["command"], list)
    (entry,) = said["results"]
    assert (entry["file"], entry["against"], entry["changed"], entry["passed"]) == ("a.npz", "b.npz", 1, False)
    assert (entry["classes"]["bug"], entry["by_own_scores"], entry["first_layer"]) == (1, 0, 0)
    words = " ".join(outcome.err.split())
    assert "1 of 3 rows differs (33.3%); layer 0 is the first with a difference" in words
    assert "Rounding explains 0 of 1 differences. It does not explain 1" in words
    coarse = run_semdiag("selections", first, second, "--format", "fp8-e5m2")
    assert coarse.code == 1, "3 and 1 are no rounding of each other in any format"


def test_without_scores_a_difference_is_unexplained(run_semdiag, write):
    outcome = run_semdiag("selections", write("a.npz", indices=TRAINING), write("b.npz", indices=TRAINING[::-1]))
    assert outcome.code == 1
    assert "Whether rounding explains the differences is unknown: neither file has scores." in outcome.out


def test_a_layout_is_named_for_both_or_for_each(run_semdiag, write):
    first = write("a.npz", indices=TRAINING)
    other = write("b.npz", indices=TRAINING.transpose(1, 0, 2))
    assert run_semdiag("selections", first, other, "--layout", "tokens,layers:layers,tokens", "--quiet").code == 0
    assert run_semdiag("selections", other, other, "--layout", "layers,tokens", "--quiet").code == 0
    assert run_semdiag("selections", first, other, "--quiet").code == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--causal",), "--causal and --keys apply to one file"),
        (("--keys", 4), "--causal and --keys apply to one file"),
        (("--layout", "tokens"), "a.npz: indices have 2 dimensions before k"),
        (("--format", "int4"), "Unknown number format"),
    ],
)
def test_options_that_do_not_fit_two_files(refusal, write, options, said):
    assert said in refusal("selections", write("a.npz", indices=TRAINING), "a.npz", *options)


def test_options_of_two_files_are_refused_for_one(refusal, write):
    name = write("a.npz", indices=RIGHT)
    assert "--layout applies to two files" in refusal("selections", name, "--layout", "tokens")


def test_files_of_other_k_and_tokens_are_refused(refusal, write):
    first = write("a.npz", indices=TRAINING)
    assert "differ in k: 2 and 1" in refusal("selections", first, write("b.npz", indices=TRAINING[..., :1]))
    assert "another tokenisation" in refusal("selections", first, write("b.npz", indices=TRAINING[:2]))


# Names of arrays, and bits


def valid_keys(*lengths):
    """Rows that choose the largest of their valid keys, where larger ones stand behind them."""
    scores = np.arange(8, dtype=np.float32)[None].repeat(len(lengths), 0)
    return {"scores": scores, "indices": np.array(lengths)[:, None] - 1}


@pytest.mark.parametrize("name", ["seq_lens", "seqlens", "context_lens", "cache_seqlens", "kv_lens"])
def test_lengths_have_many_names(run_semdiag, write, name):
    arrays = valid_keys(2, 5, 8)
    assert run_semdiag("selections", write("a.npz", **arrays), "--quiet").code == 1
    assert run_semdiag("selections", write("b.npz", **arrays, **{name: np.array([2, 5, 8])}), "--quiet").code == 0


def test_bounds_of_rows_and_of_packed_sequences_are_lengths(run_semdiag, write):
    arrays, whole = valid_keys(2, 5, 5, 8), np.array([0, 1, 3, 4])
    starts, ends = np.array([0, 2, 2, 5], np.int32), np.array([2, 5, 5, 8], np.int32)
    for known in (
        {"cu_seqlen_ks": starts, "cu_seqlen_ke": ends},
        {"cu_seqlen_ke": ends},
        {"cu_seqlens_q": whole, "cu_seqlens_k": np.array([0, 2, 5, 8])},
    ):
        assert run_semdiag("selections", write("a.npz", **arrays, **known), "--quiet").code == 0, known
    own = {"scores": np.eye(4, dtype=np.float32), "indices": np.arange(4)[:, None], "cu_seqlens": whole}
    assert run_semdiag("selections", write("b.npz", **own), "--quiet").code == 0
    own["indices"][0] = 3
    assert run_semdiag("selections", write("c.npz", **own), "--quiet").code == 1


def test_bounds_of_other_rows_are_refused(refusal, write):
    name = write("a.npz", **valid_keys(2, 5), cu_seqlens=np.array([0, 5]))
    assert "cu_seqlens must hold the bounds of the same sequences, up to the 2 rows" in refusal("selections", name)


def test_what_is_ignored_is_named_and_what_may_explain_faults_is_not_judged(run_semdiag, refusal, write):
    outcome = run_semdiag("selections", write("a.npz", indices=RIGHT, scores=SCORES, request=np.array(["x"])))
    assert (outcome.code, "Ignored: request." in outcome.out) == (0, True)
    line = refusal("selections", write("b.npz", **valid_keys(2, 5, 8), valid=np.array([2, 5, 8])))
    assert "2 rows would be faulty, but valid, which is ignored, may say which keys are valid" in line
    line = refusal("selections", write("c.npz", indices=RIGHT + 99, scores=SCORES, block_table=RIGHT))
    assert "slots of a paged cache, as it holds block_table" in line
    outcome = run_semdiag("selections", write("d.npz", indices=RIGHT + 99, scores=SCORES))
    assert (outcome.code, "may be slots of a paged cache" in outcome.out) == (1, True)


@pytest.mark.parametrize("dtype", [np.int16, np.uint16])
def test_bits_of_bfloat16_are_scores(run_semdiag, refusal, write, dtype):
    scores = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    arrays = {
        "scores": scores.view(torch.int16).numpy().view(dtype),
        "indices": scores.float().topk(4).indices.numpy(),
    }
    assert run_semdiag("selections", write("a.npz", **arrays), "--format", "bf16", "--quiet").code == 0
    arrays["indices"][0, 0] = int(scores[0].float().argmin())
    assert run_semdiag("selections", write("b.npz", **arrays), "--format", "bf16", "--quiet").code == 1
    assert "Bits of bfloat16 are read with the format bfloat16" in refusal("selections", "a.npz")


def test_errors_and_queries_in_a_file_reach_the_check(run_semdiag, write):
    wrong = {"scores": np.array([[3.0, 2.5, 1.0]], np.float32), "indices": np.array([[1]])}
    assert run_semdiag("selections", write("a.npz", **wrong), "--quiet").code == 1
    outcome = run_semdiag("selections", write("b.npz", **wrong, error=np.array([0.3])), "--json")
    assert (outcome.code, json.loads(outcome.out)["results"][0]["counts"]["within_error"]) == (0, 1)
    keys = np.array([[3.0], [2.99], [1.0]], np.float32)
    near = {"q": np.ones((1, 1), np.float32), "k": keys, "indices": np.array([[1]])}
    assert run_semdiag("selections", write("c.npz", **near), "--format", "bf16", "--quiet").code == 0
    assert run_semdiag("selections", write("d.npz", **near), "--quiet").code == 1


def test_a_format_that_was_not_named_and_a_guessed_layout_are_said(run_semdiag, write):
    outcome = run_semdiag("selections", write("a.npz", scores=SCORES, indices=WRONG))
    assert "Scores are taken for float32; name the engine's precision with --format." in outcome.out
    assert "--format" not in run_semdiag("selections", "a.npz", "--format", "bf16").out
    other = TRAINING.copy()
    other[1, 0, 1] = 3
    first, second = write("b.npz", indices=TRAINING, scores=LOGITS), write("c.npz", indices=other)
    said = " ".join(run_semdiag("selections", first, second).out.split())
    assert "The dimensions before k are read as tokens,layers; --layout names others." in said
    assert "a bug, or scores that differed already, which those of both files would tell" in said
    assert "read as" not in run_semdiag("selections", first, second, "--layout", "tokens,layers").out


@pytest.mark.parametrize(("name", "said"), [("a.npy", "numpy.load(FILE)"), ("a.pt", "weights_only=True")])
def test_other_files_are_answered_with_the_lines_that_convert(refusal, here, name, said):
    np.save("a.npy", RIGHT)
    torch.save({"indices": torch.from_numpy(RIGHT)}, "a.pt")
    assert said in refusal("selections", name)


def test_a_selection_in_parquet_warns_of_nothing(run_semdiag, write):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = run_semdiag(
            "selections", write("a.parquet", indices=RIGHT, scores=SCORES, lengths=np.array([4] * len(RIGHT)))
        )
    assert (outcome.code, outcome.err) == (0, "")
