"""``semdiag compare``: pages, JSON, other precisions; and models that cannot be compared, in one line."""

import json
import sys
import warnings

import pandas as pd
import pytest
import torch

from semdiag.measuring.findings.findings import MODEL_FACTS
from semdiag_models import Encoder, TrainingConfig, read_checkpoint
from semdiag_models.checkpoint import Checkpoint, write_checkpoint

FEW = ("--samples", 6, "--figures", "none", "--out", "page")
SOURCE = '''
import torch


class Model(torch.nn.Module):
    """Attention by hand: 2 heads."""

    def __init__(self, factor, width=8):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding, self.qkv = torch.nn.Embedding(20, width), torch.nn.Linear(width, 3 * width)
        with torch.no_grad():
            self.qkv.weight *= factor

    def forward(self, ids):
        q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in self.qkv(self.embedding(ids)).chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def one():
    return Model(1.0), torch.arange(40).view(4, 10) % 19


def other():
    return Model(1.5)


def wide():
    return Model(1.0, 16)


def infinite():  # its scores are no float32
    return Model(1e30), torch.arange(40).view(4, 10) % 19
'''


@pytest.fixture(autouse=True)
def factories(here):
    """The module ``theirs`` in the current folder."""
    (here / "theirs.py").write_text(SOURCE, encoding="utf-8")
    yield
    sys.modules.pop("theirs", None)


@pytest.mark.slow
def test_two_runs_are_compared_on_the_inputs_of_the_first(run_semdiag, here, tiny_runs):
    outcome = run_semdiag("compare", tiny_runs.full, tiny_runs.topk, *FEW, "--top", 3, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    (entry,) = found["results"]
    assert {*MODEL_FACTS, "base", "all", "outputs", "layers", "heads"} == {*entry}
    assert (entry["attention"], entry["base"]) == ("topk", str(tiny_runs.full / "last.pt"))
    assert entry["all"]["queries"] == 6 * tiny_runs.length * tiny_runs.blocks * tiny_runs.heads
    assert [row["rank"] for row in entry["heads"]] == [*range(1, tiny_runs.blocks * tiny_runs.heads + 1)]
    changes = [row["total_variation"] for row in entry["heads"]]
    assert changes == sorted(changes, reverse=True)
    assert (entry["outputs"]["predictions"], entry["outputs"]["targets"]) == (6, 6)
    known = found["provenance"]
    assert (known["dtype"], known["model_dtype"], known["samples"], known["compare_top"]) == (
        "float64",
        "float64",
        6,
        3,
    )
    assert known["base"] == entry["base"]
    table = pd.read_csv(here / "page" / "data" / "compare.csv")
    assert table["total_variation"].max() == pytest.approx(changes[0])
    page = (here / "page" / "index.html").read_text(encoding="utf-8")
    assert "What changed from the base to the model?" in page
    assert "Total variation of the weights" in page
    assert "the base" not in outcome.err


@pytest.mark.slow
def test_a_copy_of_a_checkpoint_is_the_same(run_semdiag, here, tiny_runs):
    write_checkpoint(here / "copy.pt", read_checkpoint(tiny_runs.full / "last.pt"))
    outcome = run_semdiag("compare", tiny_runs.full, "copy.pt", *FEW, "--json", "--quiet")
    (entry,) = json.loads(outcome.out)["results"]
    for name in ("total_variation", "largest", "moved", "output_change", "by_weights", "by_values"):
        assert {row[name] for row in entry["heads"]} == {0}, name
    assert (entry["outputs"]["divergence"], entry["outputs"]["changed"]) == (0, 0)
    assert entry["all"]["weights_share"] is None


@pytest.mark.slow
def test_the_terminal_shows_the_heads_that_changed_most(run_semdiag, tiny_runs):
    outcome = run_semdiag("compare", tiny_runs.full, tiny_runs.topk, *FEW)
    assert "Total variation of the weights:" in outcome.out
    assert f"{tiny_runs.blocks} layers, {tiny_runs.blocks * tiny_runs.heads} heads" in outcome.out
    assert "further heads" not in outcome.out


@pytest.mark.slow
def test_one_model_in_two_precisions(run_semdiag, here):
    outcome = run_semdiag("compare", "theirs:one", "--dtype-b", "bfloat16", *FEW[2:], "--samples", 4, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    (entry,) = found["results"]
    assert (entry["base"], entry["model"]) == ("theirs:one", "theirs:one (bfloat16)")
    assert (found["provenance"]["dtype"], found["provenance"]["model_dtype"]) == ("float32", "bfloat16")
    assert entry["all"]["total_variation"] > 0
    again = run_semdiag(
        "compare", "theirs:one", "theirs:one", "--dtype-b", "bfloat16", *FEW[2:], "--samples", 4, "--json"
    )
    assert json.loads(again.out)["results"] == found["results"]


@pytest.mark.slow
def test_a_factorys_inputs_go_through_both(run_semdiag):
    outcome = run_semdiag("compare", "theirs:one", "theirs:other", *FEW[2:], "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    (entry,) = json.loads(outcome.out)["results"]
    assert entry["all"]["queries"] == 4 * 10 * 2
    assert entry["outputs"]["predictions"] == 0
    assert entry["outputs"]["output_change"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("theirs:one",), "There is nothing to compare: name a second model, or another precision of this one"),
        (("theirs:one", "theirs:one"), "There is nothing to compare: name a second model"),
        (("theirs:one", "theirs:wide"), "theirs:one and theirs:wide cannot be compared: in layer 0 they have 4 "),
        (("theirs:one", "theirs:infinite"), "theirs:infinite cannot be compared: its attention scores are not f"),
        (("theirs:infinite", "theirs:one"), "theirs:infinite cannot be compared: its attention scores are not f"),
        (("theirs:one", "theirs:other", "--top", 0), "--top must be at least 1. Got 0."),
        (("theirs:one", "theirs:other", "--dtype-b", "int8"), "dtype must be auto, float32, float64"),
        (("theirs:other", "theirs:one"), "Name inputs for theirs:other with --inputs FILE"),
        (("theirs:one", "absent.pt"), "absent.pt"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_one_line(refusal, here, words, said):
    assert said in refusal("compare", *words, *FEW[2:])
    assert not (here / "page").exists()


def test_folders_of_several_runs_are_refused(refusal, tiny_runs):
    said = refusal("compare", tiny_runs.folder, tiny_runs.full)
    assert said == f"semdiag compare takes two models, and {tiny_runs.folder} holds 2 runs. Name one."


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"heads": 1}, "in layer 0 they have 2 heads and 1"),
        ({"blocks": 3}, "their attention is called 2 and 3 times in a forward"),
        ({"length": 8}, "The model takes inputs of length 1 to 8. Got length 12"),
        ({"vocabulary_size": 5}, "their token ids differ"),
    ],
)
def test_encoders_of_another_kind_are_refused(refusal, here, tiny_runs, tiny_config, fields, said):
    config = tiny_config(**fields)
    with torch.random.fork_rng():
        encoder = Encoder(config)
    training = TrainingConfig("even-pairs", config.length, 1, 7, 100, 40)
    write_checkpoint(here / "other.pt", Checkpoint(config, training, encoder.state_dict(), 0, {}))
    assert said in refusal("compare", tiny_runs.full, "other.pt", *FEW)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]


@pytest.fixture
def two_folders(here):
    """Call with the words of the second's tokenizer (None: it has none): two folders of tiny models, and texts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")

    def make(words):
        small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.BertConfig(vocab_size=len(WORDS), **small)
        for name, seed, own in (("one", 0, WORDS), ("two", 1, words)):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                transformers.BertForMaskedLM(config).eval().save_pretrained(here / name)
            if own:
                (here / name / "vocab.txt").write_text("\n".join(own), encoding="utf-8")
                transformers.BertTokenizer(str(here / name / "vocab.txt")).save_pretrained(here / name)
        (here / "texts.txt").write_text("a b c d\nd e f g h i\n", encoding="utf-8")
        return ("compare", "hf:one", "hf:two", "--inputs", "texts.txt", "--figures", "none", "--out", "page")

    return make


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", [WORDS, None])
def test_texts_are_cut_by_the_tokenizer_of_the_base(two_folders, run_semdiag, words):
    outcome = run_semdiag(*two_folders(words), "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    (entry,) = json.loads(outcome.out)["results"]
    assert entry["all"]["queries"] == (6 + 8) * 2 * 2  # tokens with [CLS] and [SEP]; heads; layers
    assert entry["outputs"]["predictions"] == 6 + 8
    assert entry["outputs"]["divergence"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_is_said_once_that_texts_were_cut(two_folders, run_semdiag, here):
    outcome = run_semdiag(*two_folders(None), "--max-length", 4, "--json", "--quiet")
    (entry,) = json.loads(outcome.out)["results"]
    assert entry["all"]["queries"] == 2 * 4 * 2 * 2  # texts, tokens, heads, layers
    page = (here / "page" / "index.html").read_text(encoding="utf-8")
    assert page.count("texts were cut to 4 tokens") == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_another_tokenizer_is_refused(two_folders, refusal, run_semdiag):
    words = two_folders([*WORDS[:5], *WORDS[:4:-1]])
    said = (
        "hf:one and hf:two cannot be compared: the token ids of text 1 differ. If the model was made to read those"
    )
    assert said in refusal(*words)
    assert run_semdiag(*words, "--tokenizer", "one", "--quiet").code == 0
