"""What choices of tiles keep, against dense float64 with the masks of the rules."""

import math

import pytest
import torch
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.kept_keys import Choice, all_kept
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
    kept = all_kept(Choice(rule, call))
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
