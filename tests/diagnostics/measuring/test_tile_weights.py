"""What choices of tiles keep, against dense float64 with the masks of the rules."""

import math

import pytest
import torch
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.choices import choice_of
from semdiag.capturing.kept_keys import all_kept
from semdiag.capturing.rules import SkipTiles, TopK
from semdiag_files import InputError


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dtype=torch.float64)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


BATCH = torch.randn(3, 22, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3


def mask_of(rule, call):
    kept = all_kept(choice_of(rule, call))
    return torch.ones(3, 2, 22, 22, dtype=torch.bool) if kept is None else kept[0]


def test_weights_and_recall_are_those_of_the_masks(model):
    kinds = ["tile-4x4-mean", "tile-4x4", "skip-1-4x4", "skip-3-4x4"]
    found = semdiag.tiles(model, BATCH, kinds, k=[8, 12]).set_index(["kind", "k", "layer", "head"])
    calls = []
    with torch.no_grad(), watch_attention(model, calls.append):
        model(BATCH)
    for layer, call in enumerate(calls):
        weights = call.scores(torch.float64).softmax(-1)
        kept = {name: mask_of(rule, call) for name, rule in {
            ("tile-4x4-mean", 8): TopK(2, block=4, query_block=4, estimate="mean"),
            ("tile-4x4", 8): TopK(2, block=4, query_block=4),
            ("skip-1-4x4", 0): SkipTiles(1.0, 4, 4),
            ("skip-3-4x4", 0): SkipTiles(3.0, 4, 4),
        }.items()}  # fmt: skip
        for (kind, k), mask in kept.items():
            for head in range(2):
                row = found.loc[(kind, k, layer, head)]
                assert row["weight"] == pytest.approx(float((weights * mask)[:, head].sum()) / (3 * 22), abs=1e-12)
                assert row["keys"] == pytest.approx(float(mask[:, head].double().mean()), abs=1e-12)
                assert row["weight"] <= row["exact_weight"] + 1e-12
        for head in range(2):
            row = found.loc[("tile-4x4-mean", 8, layer, head)]
            assert row["exact_weight"] == found.loc[("tile-4x4", 8, layer, head)]["weight"]
            top = float(weights[:, head].topk(8).values.sum()) / (3 * 22)
            assert row["top_weight"] == pytest.approx(top, abs=1e-12)
            first = torch.arange(22) % 4 == 0  # a query of each tile, a key of each block
            one, other = (kept[name, 8][:, head][:, first][..., first] for name in ("tile-4x4-mean", "tile-4x4"))
            assert row["recall"] == pytest.approx(float((one & other).sum() / other.sum()))
    exact = found.loc["tile-4x4"]
    assert (exact["recall"] == 1).all()
    assert found.loc["skip-3-4x4"]["keys"].mean() > found.loc["skip-1-4x4"]["keys"].mean()


@pytest.mark.parametrize(
    ("kinds", "k", "said"),
    [
        (["tile-4x4"], 3, "keeps a block"),
        (["window"], 3, "no kind of sparse attention 'window'"),
        (["tile-64x64"], 64, "larger than a text of 22 tokens"),
        (["skip-nan"], 64, "Got nan"),
    ],
)
def test_bad_input_is_one_line(model, kinds, k, said):
    with pytest.raises(InputError, match=said):
        semdiag.tiles(model, BATCH, kinds, k)
    assert math.isfinite(k)


class Causal(nn.Module):
    """Two causal heads over padded texts, whose tokens are behind the padding."""

    def __init__(self, padding):
        super().__init__()
        self.map, self.padding = nn.Linear(16, 48, dtype=torch.float64), padding

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.map(x).chunk(3, -1))
        places = torch.arange(x.shape[1])
        seen = (places >= self.padding[: len(x), None, None, None]) & (places <= places[:, None])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return mixed.nan_to_num().transpose(1, 2).flatten(2)


def other_blocks_found(rule, call, head):
    """Sums over tiles that drop a block: exact blocks but their own that are kept, by chance, and all of these."""
    sums = [0.0, 0.0, 0.0]
    seen = call.part().allowed[:, 0]
    exact, kept = (mask_of(each, call)[:, head] for each in (TopK(rule.k, block=4, query_block=4), rule))
    for text in range(len(seen)):
        start = int(seen[text].any(0).int().argmax())
        groups = [range(at, min(at + 4, 22)) for at in range(start, 22, 4)]
        for number, tile in enumerate(groups):
            there = [
                {
                    m
                    for m, keys in enumerate(groups)
                    if any(mask[text, i, j] and seen[text, i, j] for i in tile for j in keys)
                }
                for mask in (exact, kept, seen)
            ]
            if there[0] == there[2]:
                continue
            best, mine, visible = (some - {number} for some in there)
            sums[0] += len(best & mine)
            sums[1] += len(best) * len(mine) / len(visible)
            sums[2] += len(best)
    return sums


@pytest.mark.parametrize("padding", [torch.tensor([0, 0, 0]), torch.tensor([0, 3, 6])])
@pytest.mark.parametrize("name", ["mean", "last"])
def test_recall_leaves_out_a_tile_s_own_blocks_and_chance_stands_beside_it(name, padding):
    """They are always kept: with one other block of two kept, nothing found counted as two thirds."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        causal = Causal(padding)
    found = semdiag.tiles(causal, BATCH, [f"tile-4x4-{name}"], k=[4, 8, 12]).set_index(["k", "head"])
    calls = []
    with torch.no_grad(), watch_attention(causal, calls.append):
        causal(BATCH)
    for (k, head), row in found.iterrows():
        common, drawn, exact = other_blocks_found(
            TopK(k // 4, block=4, query_block=4, estimate=name), calls[0], head
        )
        if not exact:  # one block is the tile's own
            assert k == 4
            assert row[["recall", "chance"]].isna().all()
            continue
        assert row["recall"] == pytest.approx(common / exact, abs=1e-12)
        assert row["chance"] == pytest.approx(drawn / exact, abs=1e-12)
        assert 0 < row["chance"] < 1
