"""The page as a file: what it says without a script, what it holds for the script, and where it goes."""

import base64
import json
import re

import numpy as np
import pytest
import torch

import semdiag
from semdiag.questions.look.page import place_of
from semdiag_files import InputError
from semdiag_models import Encoder, ModelConfig

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
def encoder():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(ModelConfig(vocabulary_size=9, classes=2, length=6, blocks=4, heads=3)).eval()


def data_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_the_page_is_whole_asks_for_nothing_and_tokens_are_data(encoder, tmp_path):
    words = [HOSTILE, "<!--", "\u202e", "\ud800", "\u2028", "'\"&"]
    page = semdiag.look(encoder, torch.arange(6)[None], tmp_path / "a" / "look.html", tokens=words)
    text = page.read_text(encoding="utf-8")
    assert [path.name for path in page.parent.iterdir()] == ["look.html"]
    assert "default-src 'none'" in text
    assert not re.search(r"(?:src|href)=[\"'](?!#)|@import|url\(|https?:", text)
    assert HOSTILE not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert data_of(page)["labels"] == [[HOSTILE, "<!--", "\\u202e", "\ud800", "\u2028", "'\"&"]]


def test_the_scores_are_the_captures_bit_by_bit(encoder, tmp_path):
    page = semdiag.look(encoder, torch.arange(6)[None], tmp_path / "look.html", dtype=torch.float64)
    found = data_of(page)
    assert found["bytes"] == 8
    (mask,) = found["masks"]
    assert np.unpackbits(np.frombuffer(base64.b64decode(mask), np.uint8), bitorder="little")[:36].all()
    calls = []
    with torch.no_grad(), semdiag.watch_attention(encoder.double(), calls.append):
        encoder(torch.arange(6)[None])
    for layer, call in zip(found["layers"], calls, strict=True):
        for number, head in enumerate(layer["heads"]):
            z = np.frombuffer(base64.b64decode(head["scores"]), "<f8")
            assert z.tolist() == call.scores(torch.float64)[0, number].flatten().tolist()


def test_without_a_script_the_heads_furthest_out_are_a_table(encoder, tmp_path):
    page = semdiag.look(encoder, torch.arange(6)[None], tmp_path / "look.html")
    section = re.search(r'<section id="furthest">.*?</section>', page.read_text(encoding="utf-8"), re.S)[0]
    assert "<noscript>" in section
    rows = re.findall(r'<tr><td>(\d)</td><td><a href="#\d\.\d">(\d)</a></td><td>([\d.e-]+)</td>', section)
    with semdiag.capture(encoder, k=1) as calls:
        encoder(torch.arange(6)[None])
    spans = calls.dispersion().groupby(["layer", "head"])["dispersion"].median().sort_values(ascending=False)
    expected = [*spans.index[:5], *spans.index[-5:]]
    assert [(int(layer), int(head)) for layer, head, _ in rows] == expected
    assert [said for *_, said in rows] == [f"{spans[place]:.3g}" for place in expected]


def test_a_page_replaces_a_page_and_nothing_else(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = torch.arange(6)[None]
    first = semdiag.look(encoder, ids, "look.html").read_text(encoding="utf-8")
    assert semdiag.look(encoder, ids, "look.html").read_text(encoding="utf-8") == first
    (tmp_path / "mine.html").write_text("<p>mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"^mine\.html is not a page of semdiag look and is not replaced\. Name"):
        semdiag.look(encoder, ids, "mine.html")
    assert (tmp_path / "mine.html").read_text(encoding="utf-8") == "<p>mine"
    with pytest.raises(InputError, match=r"^--out takes the name of an \.html file\. Got look\.pdf\.$"):
        semdiag.look(encoder, ids, "look.pdf")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InputError, match=r"^folder\.html is a folder"):
        semdiag.look(encoder, ids, "folder.html")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"cannot be written"):
        semdiag.look(encoder, ids, "file/look.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.html", "look.html", "mine.html"]


def test_the_pages_of_two_models_of_one_name_lie_beside_each_other(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = place_of("a<b/run", None)
    assert first == place_of("other/run", None)
    first.parent.mkdir()
    first.write_text('<meta name="generator" content="semdiag look">\n<meta name="model" content="a&lt;b/run">')
    assert place_of("a<b/run", None) == first
    second = place_of("other/run", None)
    assert re.fullmatch(r"look-run-[0-9a-f]{8}\.html", second.name)


def test_tokens_are_as_many_as_the_model_has(encoder, tmp_path):
    with pytest.raises(InputError, match=r"^Got 5 tokens, but no attention of model has that many"):
        semdiag.look(encoder, torch.arange(6)[None], tmp_path / "look.html", tokens="abcde")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=r"of a text the tokenizer says it"):
        semdiag.look(encoder, "abc", tmp_path / "look.html", tokens="abc")


@pytest.mark.parametrize("broken", ["scores", "rows"])
def test_what_spoils_the_answer_stands_first(broken, encoder, tmp_path):
    model = encoder
    inputs = torch.arange(6)[None]
    if broken == "scores":
        with torch.no_grad():
            next(encoder.parameters()).fill_(torch.nan)
        said = "Heads with scores that are no finite numbers: 12 of 12."
    else:
        model, inputs = Windows(), torch.randn(1, 6, 4)
        said = "The batch axis of the model holds several rows (heads or windows): the first is shown."
    text = semdiag.look(model, inputs, tmp_path / "look.html").read_text(encoding="utf-8")
    assert f'<p class="caution">{said}</p>' in text


class Windows(torch.nn.Module):
    """Attention within windows of three tokens, which share the batch axis."""

    def forward(self, x):
        windows = x.view(2, 1, 3, 4)
        return torch.nn.functional.scaled_dot_product_attention(windows, windows, windows)


@pytest.mark.parametrize("wrong", [[True, False], [0, 1, 0, 1]])
def test_a_group_is_a_truth_value_for_each_token(wrong, encoder, tmp_path):
    with pytest.raises(InputError, match=r"^The group image must be bool, \(\d+,\)\. Got "):
        semdiag.look(encoder, torch.arange(6)[None], tmp_path / "look.html", groups={"image": wrong})
    assert not list(tmp_path.iterdir())
