"""What cut a text, and what would show more of it: --max-length, the model, the page, or the size of scores."""

import warnings
from dataclasses import replace

import pytest
import torch

from semdiag.capturing.inputs import TextOptions
from semdiag.capturing.loading import load
from semdiag.measuring.measure import Conditions
from semdiag.questions.look import measure as heads
from semdiag.questions.look.measure import see_loaded
from semdiag.questions.look.page import cautions
from semdiag.reporting.report import one_text_page

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of at most 300 tokens, with a tokenizer."""
    place = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=300, **SMALL)
        transformers.BertModel(config).eval().save_pretrained(place)
    (place / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    transformers.BertTokenizer(str(place / "vocab.txt")).save_pretrained(place)
    return place


def said(folder, words, most=None):
    """What is said of a text of so many words; two tokens more stand around them."""
    conditions = replace(Conditions(samples=1, first=1, batch_size=1), texts=TextOptions(most))
    found = cautions(see_loaded(load(f"hf:{folder}"), conditions, " ".join("a" * words)))
    return [sentence for sentence in found if sentence.startswith("The input is longer")]


def test_what_fits_is_not_cut(folder):
    assert said(folder, 8, 10) == said(folder, 254) == []


def test_a_length_that_was_asked_for_is_named_with_the_largest_one(folder):
    (sentence,) = said(folder, 9, 10)
    assert sentence == (
        "The input is longer: its first 10 tokens are shown (--max-length 10); --max-length 256 shows the most "
        "that a page holds."
    )


def test_the_page_is_named_only_where_it_cuts(folder):
    (sentence,) = said(folder, 255)
    assert "its first 256 tokens are shown (a page holds no more); of later ones" in sentence
    assert said(folder, 255, 256) == [sentence]


def test_a_model_that_takes_less_than_a_page_is_named(folder, monkeypatch):
    monkeypatch.setattr("semdiag.questions.look.measure.LONGEST", 400)
    (sentence,) = said(folder, 299)
    assert "its first 300 tokens are shown (the model takes no more)" in sentence


def test_scores_that_take_too_much_are_named(folder, monkeypatch):
    monkeypatch.setattr(heads, "LARGEST", 4 * 2 * 30**2)  # two heads of 30 queries and keys
    (sentence,) = said(folder, 40, 40)
    assert "MiB of scores)" in sentence
    assert "--max-length" not in sentence


def test_the_page_beside_a_report_names_its_own_limit(folder, tmp_path):
    (tmp_path / "texts.txt").write_text(" ".join("a" * 60), encoding="utf-8")
    conditions = Conditions(inputs=tmp_path / "texts.txt")
    page = one_text_page([load(f"hf:{folder}")], conditions)
    assert "its first 48 tokens are shown (--max-length 48); --max-length 256 shows the most" in page
    assert "--max-length 48</code>" in page
