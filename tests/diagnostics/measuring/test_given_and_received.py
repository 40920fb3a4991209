"""Weight between groups of tokens, weight received, and recall of a choice, against loops over dense weights."""

import pytest
import torch
from torch import nn

import semdiag
from semdiag_files import InputError

REAL = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
HEAD = torch.tensor([1, 1, 0, 0, 0, 0]).bool()


@pytest.fixture(scope="module")
def calls():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        x = torch.randn(2, 6, 8) * 3
    with torch.no_grad(), semdiag.capture(model, scores=True, real=REAL) as seen:
        model(x, x, x, key_padding_mask=~REAL)
    return seen


def test_groups_and_keys_are_those_of_loops(calls):
    weights = calls.weights(0)
    table = (
        calls.weight_between({"head": HEAD, "tail": REAL & ~HEAD}).set_index(["head", "group", "to"]).sort_index()
    )
    received = calls.received().set_index(["sample", "head", "key"])["received"]
    for head in range(2):
        rows = [weights[b, head, i] for b in range(2) for i in range(6) if REAL[b, i] and not HEAD[i]]
        expected = sum(float(row[:2].sum()) for row in rows) / len(rows)
        row = table.loc[(head, "tail", "head")]
        assert row["queries"] == len(rows) == 6
        assert row["weight"] == pytest.approx(expected, abs=1e-6)
        assert table.loc[(head, "tail")]["weight"].sum() == pytest.approx(1, abs=1e-6)
        for key in range(4):
            assert received[1, head, key] == pytest.approx(sum(float(weights[1, head, i, key]) for i in range(4)))


def test_the_recall_of_a_choice_is_that_of_loops(calls):
    scores, weights = calls.scores(0), calls.weights(0)
    chosen = torch.tensor([0, 3, -1]).expand(2, 1, 6, 3)
    found = calls.recall({0: chosen}).set_index("head")
    for head in range(2):
        queries = [(b, i) for b in range(2) for i in range(6) if REAL[b, i]]
        common = sum(len({0, 3} & set(scores[b, head, i].topk(2).indices.tolist())) for b, i in queries)
        assert found.loc[head, "recall"] == pytest.approx(common / (2 * len(queries)))
        kept = sum(float(weights[b, head, i, [0, 3]].sum()) for b, i in queries) / len(queries)
        assert found.loc[head, "weight"] == pytest.approx(kept, abs=1e-6)
    best = calls.recall({0: scores.topk(2).indices})
    assert (best["recall"] == 1).all()
    assert best["weight"].to_numpy() == pytest.approx(best["top_weight"].to_numpy())


def test_bad_input_is_one_line(calls):
    with pytest.raises(InputError, match=r"group image .* Got int64 of \(6,\)"):
        calls.weight_between({"image": torch.arange(6)})
    with pytest.raises(InputError, match="Got bool of"):
        calls.weight_between({"image": torch.ones(5).bool()})
    with pytest.raises(InputError, match="lie in 0 … 5"):
        calls.recall({0: torch.full((2, 2, 6, 1), 6)})
    with pytest.raises(InputError, match="whole numbers"):
        calls.recall({0: torch.zeros(2, 2, 5, 1).long()})
    with pytest.raises(InputError, match="no scores of layer 3"):
        calls.recall({3: torch.zeros(2, 2, 6, 1).long()})
