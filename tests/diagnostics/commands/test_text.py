"""``semdiag train text``, and the diagnostics of what it made."""

import json
import sys

import pandas as pd
import pytest
import torch

from semdiag_models import read_checkpoint

sentencepiece = pytest.importorskip("sentencepiece")

pytestmark = pytest.mark.usefixtures("own_random_numbers")
EPOCHLESS = "--vocabulary 100 --pieces bpe --blocks 2 --width 16 --mlp-width 16 --head-width 16"
EPOCHLESS = [*EPOCHLESS.split(), "--batch-size", "50", "--seed", "5", "--device", "cpu", "--quiet"]
TINY = [*EPOCHLESS, "--epochs", "2"]


@pytest.fixture
def corpus(here, story):
    """The story as a file of this folder's own."""
    (here / "corpus.txt").write_bytes(story.read_bytes())
    return here / "corpus.txt"


@pytest.fixture
def trained(run_semdiag, corpus):
    """A full and a top-3 run on the corpus: their folders."""
    for attention in (["full"], ["topk", "--k", 3]):
        run_semdiag("train", "text", "--text", "corpus.txt", "--attention", *attention, *TINY)
    return sorted((corpus.parent / "checkpoints").iterdir())


def test_a_run_lands_in_a_folder_named_after_the_text_and_tells_its_perplexity(run_semdiag, here, corpus):
    done = run_semdiag("train", "text", "--text", "corpus.txt", *TINY)
    assert done.code == 0
    (folder,) = (here / "checkpoints").iterdir()
    last = read_checkpoint(folder / "last.pt")
    assert folder.name == f"text-{last.training.text.label}-full-seed-5"
    assert folder.name.startswith("text-corpus-")
    assert (last.model.classes, last.model.vocabulary_size, last.training.batch_size) == (100, 101, 50)
    first, second = done.out.splitlines()
    loss = last.history["holdout_loss"][-1]
    assert f" held-out {2.718281828459045**loss:.1f} after 2 epochs (pieces' frequencies alone " in first
    assert second == f"Next: semdiag dispersion checkpoints/{folder.name}/last.pt"
    assert sorted(path.name for path in here.iterdir()) == ["checkpoints", "corpus.txt"]
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "epoch-0.pt", "history.csv", "last.pt"]
    assert "perplexity" not in (folder / "history.csv").read_text()  # derived, where it is shown


def test_without_quiet_it_says_what_the_text_gives(run_semdiag, corpus):
    loud = [word for word in TINY if word != "--quiet"]
    lines = run_semdiag("train", "text", "--text", "corpus.txt", *loud, "--out", "run").err.splitlines()
    training = read_checkpoint(corpus.parent / "run" / "last.pt").training
    assert lines[0] == (
        f"corpus.txt: windows of {training.length} pieces, {training.train_samples:,} to train on, "
        f"{training.holdout_samples:,} of the last tenth of the lines held out."
    )
    assert any("epoch 2/2" in line and "perplexity train" in line for line in lines)


def test_the_options_are_taken(run_semdiag, here, corpus):
    (here / "more.txt").write_text("the old fox hides in the wood at dawn .\n")
    words = ["--holdout-text", "more.txt", "--window", 4, "--train-samples", 60, "--holdout-samples", 5]
    assert run_semdiag("train", "text", "--text", "corpus.txt", *TINY, *words, "--out", "run").code == 0
    last = read_checkpoint(here / "run" / "last.pt")
    assert (last.training.length, last.model.length) == (4, 4)
    assert (last.training.train_samples, last.training.holdout_samples) == (60, 5)
    assert (last.training.text.tokenizer, last.training.text.holdout_file) == ("bpe", "more.txt")


@pytest.mark.slow
def test_interrupted_and_resumed_is_uninterrupted(run_semdiag, here, corpus):
    for out, steps in (("whole", [2]), ("parts", [1, 2])):
        for epochs in steps:
            more = ["--resume"] if epochs > steps[0] else []
            assert run_semdiag(
                "train", "text", "--text", "corpus.txt", *EPOCHLESS, "--epochs", epochs, "--out", out, *more
            ).code == 0  # fmt: skip
    whole, parts = (read_checkpoint(here / out / "last.pt").state for out in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["text"], "The task text needs a file to learn from: semdiag train text --text FILE."),
        (["even-pairs", "--text", "corpus.txt"], "--text and its options apply only to the task text: "),
        (["even-pairs", "--vocabulary", "9"], "--text and its options apply only to the task text: "),
        (["text", "--text", "nowhere.txt"], "nowhere.txt does not exist."),
        (["text", "--text", "empty.txt"], "empty.txt is empty: "),
        (["text", "--text", "one.txt"], "one.txt has one line; "),
        (["text", "--text", "latin.txt"], "latin.txt is not UTF-8: byte 0xe9 in line 1."),
        (["text", "--text", "binary.txt"], "binary.txt is not a text: it holds zero bytes."),
        (["text", "--text", "corpus.txt"], "--vocabulary 4096 is more than this text supports. Use --vocabulary "),
        (["text", "--text", "corpus.txt", "--vocabulary", "0"], "--vocabulary must lie in 3 … 99999. Got 0."),
        (["text", "--text", "corpus.txt", "--pieces", "words"], "Unknown tokenizer 'words'."),
        (["text", "--text", "corpus.txt", "--tokenizer", "bpe"], "--tokenizer of semdiag train is now --pieces"),
        (["text", "--text", "corpus.txt", *TINY, "--window", "0"], "--window must be at least 1. Got 0."),
        (["text", "--text", "corpus.txt", *TINY, "--window", "99"], "has more than 99 pieces: no window"),
        (
            ["text", "--text", "corpus.txt", *TINY, "--k", "3"],
            "full attention takes no k; banded, block, topk, bottomk, ",
        ),
        (
            ["text", "--text", "corpus.txt", *TINY, "--train-samples", "99999"],
            "corpus.txt has 681 windows of 16 pieces; 99999 were asked for.",
        ),
        (["text", "--text", "corpus.txt", "--holdout-text", "empty.txt", *TINY], "empty.txt is empty: "),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(refusal, here, corpus, words, message):
    contents = {"empty": b"", "one": b"just a line", "latin": b"caf\xe9\nx\n", "binary": b"\x7fELF\0"}
    for name, content in contents.items():
        (here / f"{name}.txt").write_bytes(content)
    before = sorted(here.rglob("*"))
    assert message in refusal("train", *words)
    assert sorted(here.rglob("*")) == before


def test_without_the_package_the_line_is_the_command_that_brings_it(refusal, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert refusal("train", "text", "--text", "corpus.txt").endswith(": pip install sentencepiece")


@pytest.mark.slow
def test_info_shows_the_text_and_its_perplexity_and_not_the_tokenizer(run_semdiag, trained, story):
    last = read_checkpoint(trained[0] / "last.pt")
    told = json.loads(run_semdiag("info", trained[0], "--json").out)
    assert (told["text"]["file"], told["text"]["vocabulary"]) == ("corpus.txt", 100)
    assert told["text"]["model"].startswith("SentencePiece, ")
    assert "text" not in told["training"]
    for split in ("train", "holdout"):
        expected = 2.718281828459045 ** last.history[f"{split}_loss"][-1]
        assert told["last epoch"][f"{split}_perplexity"] == pytest.approx(expected)
    start = json.loads(run_semdiag("info", trained[0] / "epoch-0.pt", "--json").out)
    assert start["last epoch"] == {}
    shown = run_semdiag("info", trained[0]).out
    assert "holdout_perplexity" in shown
    assert len(shown) < 10_000


@pytest.mark.slow
def test_dispersion_is_measured_on_the_held_out_windows(run_semdiag, here, trained):
    done = run_semdiag(
        "dispersion", *trained, "--json", "--figures", "none", "--per-query", "q.parquet", "--quiet"
    )
    assert done.code == 0, done.err
    full, topk = json.loads(done.out)["results"]
    assert full["task"] == topk["task"]
    assert full["task"].startswith("text-corpus-")
    training = read_checkpoint(trained[0] / "last.pt").training
    assert training.holdout_samples < 500  # fewer than --samples: all are taken
    queries = pd.read_parquet(here / "q.parquet")
    assert queries["sample"].nunique() == training.holdout_samples
    assert full["all"]["queries"] == training.holdout_samples * training.length * 2


@pytest.mark.slow
def test_another_text_can_be_measured_on_without_the_first(run_semdiag, refusal, here, trained):
    (here / "corpus.txt").rename(here / "other.txt")
    line = refusal("dispersion", trained[0], "--quiet")
    assert "The text corpus.txt of this run is not here. Any text works with --inputs FILE.txt." in line
    words = ["--inputs", "other.txt", "--samples", 30, "--json", "--figures", "none", "--quiet"]
    done = run_semdiag("dispersion", trained[0], *words)
    assert done.code == 0, done.err
    training = read_checkpoint(trained[0] / "last.pt").training
    assert json.loads(done.out)["results"][0]["all"]["queries"] == 30 * training.length * 2
    (here / "corpus.txt").write_text("a text\nof another kind\n")
    assert "corpus.txt has changed since the run (SHA-256 " in refusal("dispersion", trained[0], "--quiet")
    assert "has more than 16 pieces: no window" in refusal("dispersion", trained[0], "--inputs", "corpus.txt")


@pytest.mark.slow
def test_a_report_on_text_is_drawn(run_semdiag, here, trained):
    done = run_semdiag("report", *trained, "--samples", 20, "--out", "page", "--figures", "svg", "--quiet")
    assert done.code == 0, done.err
    page = (here / "page" / "index.html").read_text(encoding="utf-8")
    assert "text-corpus-" in page
    assert "windows of corpus.txt" in page
    assert "figures/training_curves.svg" in page
    assert run_semdiag("check", *trained, "--samples", 20).code in (0, 1)
