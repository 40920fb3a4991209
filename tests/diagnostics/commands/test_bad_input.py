"""Everything a user can get wrong: exit code 2, one line on stderr, nothing on stdout, nothing half-written."""

import os
import pickle
import shutil

import numpy as np
import pytest
import torch

MEASURING = ("dispersion", "separation", "report", "check")


@pytest.fixture
def untouched(here):
    """Checks in the end that the working folder is as it was after ``keep``."""
    known = set()

    def keep():
        known.update(here.rglob("*"))

    yield keep
    assert known
    assert {path for path in {*here.rglob("*")} ^ known if "__pycache__" not in path.parts} == set()


class Malicious:
    """Unpickling it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("made",)


def not_a_checkpoint(path, last):
    path.write_text("No tensors in here.")


def truncated(path, last):
    path.write_bytes(last[: len(last) // 2])


def empty(path, last):
    path.write_bytes(b"")


def code(path, last):
    torch.save({"format": "semdiag/1", "config": Malicious()}, path)


def bare_pickle(path, last):
    path.write_bytes(pickle.dumps(Malicious()))


def misshapen(path, last):
    path.write_bytes(last)
    content = torch.load(path, weights_only=True)
    content["model_state"]["blocks.0.expand.weight"] = torch.zeros(3, 3)
    torch.save(content, path)


def k_zero(path, last):
    path.write_bytes(last)
    content = torch.load(path, weights_only=True)
    content["config"]["model"] |= {"attention": "topk", "k": 0}
    torch.save(content, path)


def external(path, last):
    torch.save(torch.nn.Linear(2, 2).state_dict(), path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (not_a_checkpoint, "odd.pt is not a checkpoint"),
        (truncated, "odd.pt is not a checkpoint, or it is truncated"),
        (empty, "odd.pt is not a checkpoint"),
        (code, "odd.pt refused: it holds the code object posix.mkdir"),
        (bare_pickle, "odd.pt refused: it holds the code object posix.mkdir"),
        (misshapen, "parameter 'blocks.0.expand.weight' has shape (3, 3); its configuration says (16, 16)."),
        (k_zero, "k must lie in [1, 100000]. Got k=0."),
    ],
)
@pytest.mark.parametrize("command", ["info", "dispersion", "check", "report"])
def test_files_that_are_no_checkpoints(refusal, here, untouched, tiny_runs, command, make, message):
    make(here / "odd.pt", (tiny_runs.full / "last.pt").read_bytes())
    untouched()
    assert message in refusal(command, "odd.pt")


@pytest.mark.parametrize("command", ["dispersion", "check", "report"])  # info says what it holds
def test_weights_without_their_model_are_not_measured(refusal, here, untouched, command):
    external(here / "odd.pt", b"")
    untouched()
    assert "odd.pt holds weights without their model (a state dict)." in refusal(command, "odd.pt")


def inputs(tokens):
    return lambda path: np.save(path, np.array(tokens))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (inputs([[0, 1, 3]]), "Token id 3 is out of range: the model knows 0 to 2."),
        (inputs([[0, -1]]), "Token id -1 is out of range: the model knows 0 to 2."),
        (inputs([[0] * 13]), "The model takes inputs of length 1 to 12. Got length 13."),
        (inputs([[2] * 12]), "There is no query to measure: all input tokens are PAD."),
        (
            inputs([[0.5, 1.0]]),
            "must hold whole token ids of shape (N, L), at least one. Got torch.float64 (1, 2).",
        ),
        (inputs([0, 1]), "must hold whole token ids of shape (N, L), at least one. Got torch.int64 (2,)."),
        (inputs(np.zeros((0, 12), int)), "at least one. Got torch.int64 (0, 12)."),
        (lambda path: path.write_bytes(b"\x93NUMPY"), "tokens.npy cannot be read as an array of numbers"),
        (
            lambda path: np.save(path, np.array([[Malicious()]])),
            "tokens.npy cannot be read as an array of numbers",
        ),
    ],
)
@pytest.mark.parametrize("command", ["dispersion", "check"])
def test_inputs_that_do_not_fit(refusal, here, untouched, tiny_runs, command, make, message):
    make(here / "tokens.npy")
    untouched()
    assert message in refusal(command, tiny_runs.full, "--inputs", "tokens.npy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "0"], "samples must be at least 1. Got 0."),
        (["--samples", "41"], "has 40 held-out samples; --samples must not be larger. Got --samples 41."),
        (["--batch-size", "-1"], "batch_size must be at least 1. Got -1."),
        (["--dtype", "float8"], "dtype must be auto, float32, float64, bfloat16, float16. Got 'float8'."),
        (["--device", "abacus"], "Unknown device 'abacus'. Known: auto, cuda, mps, cpu."),
        (["--inputs", "nowhere.npy"], "nowhere.npy does not exist."),
        (
            ["--inputs", "kept.csv"],
            "token ids of shape (N, L), or as .txt or .jsonl for hf: models and models of text. Got kept.csv.",
        ),
        (["--inputs", "kept.txt"], "was not trained on text: --inputs takes token ids (.npy, .npz or .pt)."),
        (["nowhere.pt"], "nowhere.pt does not exist."),
        (["own.models"], "own.models does not exist. Models are .pt files"),
        (["gpt2"], "hf download gpt2 --local-dir gpt2; then name hf:gpt2."),
        (["org/name-1.7b"], "hf download org/name-1.7b --local-dir name-1.7b; then name hf:name-1.7b."),
        (["hf:org/name"], "hf download org/name --local-dir name; then name hf:name."),
    ],
)
@pytest.mark.parametrize("command", MEASURING)
def test_options_of_every_measuring_command(refusal, here, untouched, tiny_runs, command, words, message):
    (here / "kept.txt").write_text("0 1")
    (here / "kept.csv").write_text("0 1")
    untouched()
    assert message in refusal(command, tiny_runs.full, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("command", MEASURING)
def test_cuda_where_there_is_none(refusal, here, tiny_runs, command):
    line = refusal(command, tiny_runs.full, "--device", "cuda")
    assert line == "No cuda device here. Use --device auto or --device cpu."
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--k", "0"], "k must lie in 1 … 12, the length of the inputs. Got k=0."),
        (["--k", "13"], "k must lie in 1 … 12, the length of the inputs. Got k=13."),
        (["--k", "5,many"], "--k takes whole numbers separated by commas, like 4,8,16. Got '5,many'."),
        (["--min-keys", "0"], "min_keys must be at least 1. Got 0."),
        (["--min-keys", "13"], "has 13 keys. Use a smaller --min-keys."),
        (["--figures", "pgn"], "Unknown figure format 'pgn'. Did you mean 'png'? Known: png, svg, pdf, none."),
        (["--config", "nowhere.json"], "--config nowhere.json does not exist."),
        (["--config", "broken.json"], "--config broken.json cannot be read as JSON"),
        (["--config", "list.json"], "--config list.json must hold a JSON object. Got list."),
        (["--config", "idle.json"], "--config describes checkpoints of the paper's code, but"),
        (["--out", "broken.json"], "broken.json"),
        (["--out", "broken.json/below"], "broken.json"),
    ],
)
@pytest.mark.parametrize("command", ["dispersion", "separation", "report"])
def test_options_of_commands_that_write(refusal, here, untouched, tiny_runs, command, words, message):
    (here / "broken.json").write_text("{")
    (here / "list.json").write_text("[1]")
    (here / "idle.json").write_text("{}")
    untouched()
    assert message in refusal(command, tiny_runs.full, "--samples", 4, *words)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("queries.csv", "--per-query takes a file name that ends in .parquet. Got queries.csv."),
        ("nowhere/queries.parquet", "there is no folder nowhere."),
        ("taken/queries.parquet", "there is no folder taken."),
    ],
)
def test_per_query_files_that_cannot_be_written(refusal, here, untouched, tiny_runs, name, message):
    (here / "taken").write_text("a file, not a folder")
    untouched()
    assert message in refusal("dispersion", tiny_runs.full, "--samples", 4, "--per-query", name)


def test_saved_measurements_that_are_none(refusal, here, untouched, tiny_runs):
    (here / "empty").mkdir()
    untouched()
    assert "empty does not hold saved measurements" in refusal("report", "--from", "empty")
    assert (
        refusal("report", tiny_runs.full, "--from", "empty")
        == "--from draws saved measurements: do not name models with it."
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dispersion", "RUN", "RUN"), "last.pt is named twice."),
        (("dispersion", "RUN", "--out", "taken"), "taken is a file. Name a folder for the report with --out DIR."),
        (("dispersion", "RUN", "--out", "taken/deep/er"), "taken is a file."),
        (("report", "RUN", "--out", "mine"), "mine is not empty and not a semdiag report."),
        (("check", "no_encoder:build"), "These work on any model: semdiag info, "),
    ],
)
def test_what_can_be_known_before_is_refused_before_anything_is_measured(
    refusal, here, untouched, tiny_runs, monkeypatch, words, message
):
    (here / "taken").write_text("a file, not a folder")
    (here / "mine").mkdir()
    (here / "mine" / "thesis.txt").write_text("mine")
    (here / "no_encoder.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.MultiheadAttention(4, 1), torch.ones(3, 2, 4)\n"
    )
    for copy in ("same.pt", "again.pt"):
        shutil.copy(tiny_runs.full / "epoch-0.pt", here / copy)
    untouched()
    monkeypatch.setattr("semdiag.measuring.survey.measure", lambda *_, **__: pytest.fail("something was measured"))
    run = str(tiny_runs.full)
    assert message in refusal(*(str(word).replace("RUN", run) for word in words), "--samples", 4)


def test_a_list_with_spaces_is_told_to_have_commas(refusal, here, tiny_runs):
    said = refusal("dispersion", tiny_runs.full, "--k", "4", "8")
    assert "8 does not exist. Is it a number of a list? A list has commas and no spaces: --k 4,8." in said
