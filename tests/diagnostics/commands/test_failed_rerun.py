"""A run with masks that fails: all else is delivered, and the failure comes first, as the exit code, too."""

import json
import re

import pytest

SOURCE = '''
import torch


class Model(torch.nn.Module):
    """Attention by hand that refuses to run once a key has no weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.qkv = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 24)

    def forward(self, ids):
        q, k, v = (x.unflatten(2, (2, 4)).transpose(1, 2) for x in self.qkv(self.embedding(ids)).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        if (weights == 0).any():
            raise ArithmeticError("a key has no weight")
        return (weights @ v).transpose(1, 2).flatten(2)


def build():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(), torch.randint(0, 50, (6, 11))
'''
WHY = "a key has no weight"


@pytest.fixture(autouse=True)
def factory(here):
    (here / "refusing.py").write_text(SOURCE)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "k-sweep"])
def test_a_run_with_masks_that_failed_is_the_first_line_and_the_exit_code(run_semdiag, here, command):
    """It exited with 0 and asked the user to run it with masks; the reason stood in a fold."""
    done = run_semdiag(command, "refusing:build", "--out", "page", "--figures", "svg")
    assert done.code == 2
    assert WHY in done.err.splitlines()[-1]
    assert WHY in done.out.splitlines()[0]
    assert "--rerun" not in done.out
    summary = json.loads((here / "page" / "summary.json").read_text())
    assert WHY in summary["verdict"][0]
    page = (here / "page" / "index.html").read_text()
    first_heading = re.search(r"<h1>(.*?)</h1>", page, re.S)
    assert WHY in first_heading[1]
    text = re.sub(r"<[^>]+>", " ", page).lower()
    assert "no model was run with masks" not in text
    assert "the model was run with masks" not in text
    assert (here / "page" / "data" / "dispersion.csv").exists()


@pytest.mark.slow
def test_json_is_whole_and_what_was_not_run_is_no_failure(run_semdiag, here):
    done = run_semdiag("k-sweep", "refusing:build", "--out", "page", "--json")
    assert done.code == 2
    assert WHY not in json.loads(done.out)["results"][0]["verdict"]["answer"]
    assert run_semdiag("k-sweep", "refusing:build", "--out", "page", "--no-rerun").code == 0
    assert run_semdiag("report", "refusing:build", "--out", "other", "--rerun-minutes", "0").code == 0


ACROSS = '''
import torch


class Model(torch.nn.Module):
    """Attention of five learned queries to all tokens: a window means nothing."""

    def __init__(self):
        super().__init__()
        self.embedding, self.kv = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 16)
        self.queries = torch.nn.Parameter(torch.randn(5, 8))

    def forward(self, ids):
        k, v = (x.unflatten(2, (2, 4)).transpose(1, 2) for x in self.kv(self.embedding(ids)).chunk(2, -1))
        q = self.queries.expand(len(ids), 5, 8).unflatten(2, (2, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def build():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(), torch.randint(0, 50, (3, 70))
'''


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "k-sweep"])
def test_kinds_that_were_not_run_are_named_with_their_reason(run_semdiag, here, command):
    """They were a remark in a fold."""
    (here / "across.py").write_text(ACROSS)
    done = run_semdiag(command, "across:build", "--out", "page", "--figures", "none")
    assert done.code == 0
    reason = "Window was not run"
    assert reason in " ".join(done.out.split())
    summary = json.loads((here / "page" / "summary.json").read_text())
    (sentence,) = (words for words in summary["verdict"] if words.startswith(reason))
    assert "its queries and keys are different tokens" in sentence
    assert sentence in re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", (here / "page" / "index.html").read_text()))
