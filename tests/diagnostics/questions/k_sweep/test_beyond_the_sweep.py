"""A k that is run with masks and is above the largest of the sweep: it is judged, and what is unknown is said."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.presenting.answer import show
from semdiag.questions.k_sweep import LARGEST_K, QUESTION, KSweepPlan
from semdiag.questions.k_sweep.changes import change_table
from semdiag.questions.k_sweep.wording import kinds_lines, length_lines, sparse_verdict, verdict_lines

LETTERS, LENGTH = 5, 260


class Sharp(nn.Module):
    """One block of causal attention with large scores, to the logits of the next token."""

    def __init__(self, width=8):
        super().__init__()
        self.tokens, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, LETTERS)

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        q, k, v = (2 * part for part in self.qkv(x)[:, None].chunk(3, -1))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


@pytest.fixture(scope="module")
def findings():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Sharp().double().eval()
    ids = torch.randint(LETTERS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=[ids])
    plan = KSweepPlan(rerun=True, kinds=("topk", "window"))
    return Findings(survey([loaded], Conditions(plans=(plan,), dtype="float64")))


@pytest.mark.slow
def test_the_share_of_every_k_that_was_run_is_known_and_decides_which_are_judged(findings):
    top = change_table(findings).query("mask == 'topk'").set_index("k")
    assert list(top.index) == [32, 64, 128]
    for k in top.index:
        keys = range(1, LENGTH + 1)
        assert top.loc[k, "kept"] == pytest.approx(sum(min(k, n) for n in keys) / sum(keys), rel=1e-12)
        assert (top.loc[k, "weight_kept"] > 0) == (k <= LARGEST_K)
    # At most half of the keys: 64, not 128. It was left out, and 32 was called the largest that is sparse.
    assert top["kept"].between(0.0, 0.5).tolist() == [True, True, False]
    found = sparse_verdict(findings, "own:model")
    assert found.k == 64
    assert (found.queries, found.left_out) == (0, 0)


def test_what_is_unknown_there_is_said_where_it_is_missing(findings, capsys):
    show(QUESTION.answered(findings), every=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "Weight and change of head of k = 64, 128 are unknown: the sweep ends below (--max-k)." in printed
    assert "Weight and change of head are those of top-k by head alone." in printed
    assert "nan" not in printed.lower().replace("semdiag", "")


def test_every_change_and_every_limit_names_what_it_is_a_change_of(findings):
    lines = [*kinds_lines(findings, "own:model"), *length_lines(findings, "own:model")]
    assert [line.split(" by ")[0].split(" with ")[0] for line in lines] == ["Change of perplexity"]
    assert "is at most 1% of perplexity, and" in " ".join(verdict_lines(findings, "own:model"))
