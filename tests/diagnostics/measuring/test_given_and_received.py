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


class Indexed(nn.Module):
    """Causal attention to the keys with the largest scores of an indexer, as DeepSeek-V3.2 has it."""

    def __init__(self, index_topk, fixed=None):
        super().__init__()
        self.map, self.index = nn.Linear(8, 24), nn.Linear(8, 8)
        self.index_topk, self.fixed, self.chosen = index_topk, fixed, None

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.map(x).chunk(3, -1))
        length = x.shape[1]
        future = torch.ones(length, length).triu(1).bool()
        ranked = (self.index(x) @ x.mT).masked_fill(future, -torch.inf)
        values, self.chosen = ranked.topk(min(self.index_topk, length))
        self.chosen = self.chosen.masked_fill(values == -torch.inf, -1)[:, None]
        seen = torch.zeros(len(x), length, length + 1).scatter(-1, self.chosen[:, 0] % (length + 1), 1.0).bool()
        seen = seen[:, None, :, :-1] if self.fixed is None else self.fixed & ~future
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def recorded(model):
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), semdiag.capture(model.eval(), scores=True) as seen:
        model(x)
    return seen


def test_the_recall_of_an_indexer_is_not_measured_among_the_keys_that_it_left():
    """It was always 1: scores of the keys that it dropped are not in the capture."""
    torch.manual_seed(0)
    model = Indexed(4)
    calls, own = recorded(model), model.chosen
    for chosen in (own, torch.arange(4).expand(2, 1, 12, 4)):  # another indexer's, too
        with pytest.raises(InputError, match="index_topk"):
            calls.recall({0: chosen})
    model.index_topk = 12
    dense = recorded(model)
    scores = dense.scores(0)
    found = dense.recall({0: own}).set_index("head")["recall"]
    for head in range(2):
        common, exact = 0, 0
        for b, i in torch.cartesian_prod(torch.arange(2), torch.arange(12)).tolist():
            mine = {j for j in own[b, 0, i].tolist() if j >= 0}
            order = sorted(range(i + 1), key=lambda j: -float(scores[b, head, i, j]))
            common, exact = common + len(mine & set(order[: len(mine)])), exact + len(mine)
        assert found[head] == pytest.approx(common / exact)
        assert found[head] < 0.9


def test_recall_under_masks_by_position_is_measured_among_the_keys_that_they_leave():
    places = torch.arange(12)
    back = places[:, None] - places
    window, strided = back < 5, (back % 2 == 0)
    for fixed in (window, strided):
        calls = recorded(Indexed(4, fixed))
        chosen = places[:, None].expand(2, 1, 12, 1)  # each query's own key
        if fixed is strided:
            with pytest.warns(UserWarning, match="the recall is among those that it sees"):
                found = calls.recall({0: chosen})
        else:
            found = calls.recall({0: chosen})
        best = calls.scores(0).argmax(-1) == places
        assert found["recall"].tolist() == pytest.approx(best.double().mean((0, 2)).tolist())
