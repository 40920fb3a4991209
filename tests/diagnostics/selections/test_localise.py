"""A court: mistakes that ports of indexers made, planted in an indexer written by hand; each is named."""

import pytest
import torch

from semdiag.mathematics.indexers import IndexerForm, IndexerInputs, index_scores
from semdiag.selections.localise import Indexer, Suspect, localise

K, HEADS, WIDTH, ROTARY, BASE = 6, 3, 16, 8, 10_000.0


def made(seed, lengths=(40, 33, 25), spread=1.0):
    """Random projections of some sequences, in float32; ``spread`` is that of the keys."""
    draw = torch.Generator().manual_seed(seed)
    weight, bias = torch.rand(WIDTH, generator=draw) + 0.5, torch.randn(WIDTH, generator=draw) * 0.3
    sequences = []
    for length in lengths:
        rate = BASE ** (-torch.arange(ROTARY // 2) * 2 / ROTARY)
        angle = (torch.arange(length)[:, None] * rate).repeat(1, 2)
        sequences.append(
            IndexerInputs(
                torch.randn(length, HEADS, WIDTH, generator=draw),
                spread * torch.randn(length, WIDTH, generator=draw),
                torch.randn(length, HEADS, generator=draw),
                angle.cos(), angle.sin(), weight, bias, 1e-6, torch.arange(length),
            )
        )  # fmt: skip
    return sequences


def rotated(vectors, positions, layout="halves", base=BASE, sign=1):
    """Rotate the first numbers of vectors (T, D), pair by pair."""
    turned = vectors.clone()
    for pair in range(ROTARY // 2):
        angle = positions * base ** (-2 * pair / ROTARY)
        a, b = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + ROTARY // 2)
        turned[:, a] = vectors[:, a] * angle.cos() - sign * vectors[:, b] * angle.sin()
        turned[:, b] = vectors[:, b] * angle.cos() + sign * vectors[:, a] * angle.sin()
    return turned


def port(
    inputs, layout="halves", base=BASE, sign=1, shift=0, rotate=True, eps=1e-6, center=True, affine=True,
    relu=True, total=sum, equal=False, ahead=0, chunk=0, causal=True, rounding=lambda values: values,
):  # fmt: skip
    """Scores (T, T), query by query and head by head."""
    length = len(inputs.keys)
    at = torch.arange(length)

    def turn(vectors, moved):
        return rounding(rotated(vectors, at + moved, layout, base, sign) if rotate else vectors)

    keys = inputs.keys - inputs.keys.mean(1, keepdim=True) if center else inputs.keys
    keys = keys / (keys.square().mean(1, keepdim=True) + eps).sqrt()
    keys = turn(keys * inputs.norm_weight + inputs.norm_bias if affine else keys, shift)
    queries = [turn(inputs.queries[:, head], 0) for head in range(HEADS)]
    scores = torch.full((length, length), -torch.inf, dtype=keys.dtype)
    for query in range(length):
        heads = []
        for head in range(HEADS):
            products = keys @ queries[head][query]
            products = products.relu() if relu else products
            heads.append(products * (1.0 if equal else inputs.head_weights[query, head]))
        allowed = (at <= query + ahead) | (not causal)
        if chunk:
            allowed &= at // chunk == query // chunk
        scores[query, allowed] = total(heads)[allowed]
    return scores


def chosen(scores, k=K):
    """The k largest keys, by number; -1 where there are fewer."""
    indices = scores.topk(min(k, scores.shape[1]), 1).indices
    return indices.masked_fill(scores.gather(1, indices) == -torch.inf, -1)


def stacked(tables, filler, width):
    return torch.cat([torch.nn.functional.pad(each, (0, width - each.shape[1]), value=filler) for each in tables])


def suspect_of(sequences, choose=chosen, with_scores=False, **mistake):
    """What a port with a mistake chooses."""
    scores = [port(each, **mistake) for each in sequences]
    indices = [choose(each) for each in scores]
    width = max(each.shape[1] for each in scores)
    return Suspect(
        stacked(indices, -1, max(each.shape[1] for each in indices)),
        stacked(scores, -torch.inf, width) if with_scores else None,
    )


def indexer_of(sequences):
    return Indexer("layers.0.indexer", sequences, IndexerForm(), K)


def at_rows(change):
    """Choose by rows: the change is given the choice of all rows."""
    return lambda scores: change(chosen(scores), scores)


def from_1(indices, scores):
    return (indices + 1).masked_fill(indices < 0, -1)


def newest(indices, scores):
    return torch.stack([torch.arange(row, row - K, -1).clamp(min=-1) for row in range(len(indices))])


def half(values):
    return values.bfloat16().float()


def eighth(values):
    return values.to(torch.float8_e4m3fn).float()


COURT = {  # fault: stage, words, what is planted
    "rotary halves taken for pairs (mlx-lm 1431)": ("rotary", "interleaved", {"layout": "interleaved"}),
    "no rotation": ("rotary", "not applied", {"rotate": False}),
    "another base": ("rotary", "base 1e+06", {"base": 1e6}),
    "rotation the other way": ("rotary", "the other way", {"sign": -1}),
    "keys at the next position": ("rotary", "positions of keys +1", {"shift": 1}),
    "wrong eps": ("norm", "eps = 1e-05", {"eps": 1e-5}),
    "RMS norm": ("norm", "RMS norm", {"center": False}),
    "norm without its weight": ("norm", "no weight and bias", {"affine": False}),
    "no weights of heads": ("head weights", "equal", {"equal": True}),
    "no ReLU": ("sum over heads", "no ReLU", {"relu": False}),
    "largest head": ("sum over heads", "largest head", {"total": lambda heads: torch.stack(heads).amax(0)}),
    "mask hides the query's own key": ("mask", "1 earlier", {"ahead": -1}),
    "mask shows the next key": ("mask", "1 later", {"ahead": 1}),
    "no causal mask": ("mask", "no causal mask", {"causal": False}),
    "keys of the chunk alone (vllm 47827)": ("mask", "chunk of 16 alone", {"chunk": 16}),
    "half of k": ("k", "k = 3 instead of 6", {"choose": lambda scores: chosen(scores, 3)}),
    "indices from 1": ("indices", "counted from 1", {"choose": at_rows(from_1)}),
    "stale choice (Megatron 6020)": (
        "staleness", "query before", {"choose": at_rows(lambda i, s: torch.cat([i[:1], i[:-1]]))},
    ),
    "newest keys (llama.cpp 27754)": ("degenerate", "newest keys", {"choose": at_rows(newest)}),
    "first keys": ("degenerate", "first keys", {"choose": lambda s: torch.arange(K).expand(len(s), -1)}),
    "zeros": ("degenerate", "zeros", {"choose": lambda s: torch.zeros(len(s), K, dtype=torch.int64)}),
    "smallest scores": (
        "degenerate", "lowest", {"choose": lambda s: chosen((-s).masked_fill(s == -torch.inf, -torch.inf))},
    ),
    "operands in bfloat16": ("precision", "queries and keys in bfloat16", {"rounding": half}),
    "keys in FP8 (vllm 48558)": ("precision", "float8_e4m3fn", {"rounding": eighth}),
}  # fmt: skip


@pytest.mark.parametrize("fault", COURT)
def test_each_fault_is_named_with_its_stage(fault):
    stage, words, planted = COURT[fault]
    sequences = made(sum(map(ord, fault)), spread=2e-3 if stage == "norm" else 1.0)
    found = localise(indexer_of(sequences), suspect_of(sequences, **planted))
    assert found.stage == stage
    assert any(words in mistake for mistake in found.mistakes), found
    assert found.explained >= 0.99 > found.by_reference
    if stage not in ("staleness", "degenerate", "k", "indices"):  # scores tell the same
        by_scores = localise(indexer_of(sequences), suspect_of(sequences, with_scores=True, **planted))
        assert (by_scores.stage, by_scores.explained) == (stage, 1.0)
        assert any(words in mistake for mistake in by_scores.mistakes)


def test_a_choice_of_another_layer_is_named():
    sequences, other = made(1), made(2)
    donors = {"layers.1.indexer": suspect_of(other, with_scores=True).scores}
    found = localise(indexer_of(sequences), suspect_of(other), donors)
    assert (found.stage, found.mistakes) == ("sharing", ("the choice of layers.1.indexer",))


@pytest.mark.parametrize("first", [False, True])
def test_a_choice_for_another_sequence_is_stale(first):
    sequences = made(3, (30, 30, 30))
    right = suspect_of(sequences).indices
    late = torch.cat([right[:30]] * 3) if first else torch.cat([right[:30], right[:-30]])
    found = localise(indexer_of(sequences), Suspect(late))
    assert found.stage == "staleness"
    assert found.mistakes == (f"the choice of the {'first sequence' if first else 'sequence before'}",)


def test_other_weights_are_of_the_projection():
    sequences, other = made(4), made(5)
    suspect = suspect_of(other)
    found = localise(indexer_of(sequences), suspect)
    assert (found.stage, found.explained < 0.5) == ("", True)
    queries = torch.cat([each.queries for each in other])
    found = localise(indexer_of(sequences), Suspect(suspect.indices, queries=queries))
    assert found.stage == "projection"
    assert "queries already differ" in found.mistakes[0]
    right = torch.cat([each.queries for each in sequences])
    assert not localise(indexer_of(sequences), Suspect(suspect_of(sequences).indices, queries=right)).differs


def test_scores_times_a_constant_change_no_choice_and_are_named():
    sequences = made(6)
    right = suspect_of(sequences, with_scores=True)
    found = localise(indexer_of(sequences), Suspect(right.indices, right.scores * 4))
    assert (found.stage, found.mistakes) == ("head weights", ("all scores times a constant",))


def test_two_mistakes_at_once_are_none_of_the_known_ones():
    sequences = made(7)
    found = localise(indexer_of(sequences), suspect_of(sequences, layout="interleaved", relu=False))
    assert found.stage == ""
    assert found.differs
    assert found.explained < 0.9


@pytest.mark.parametrize("with_scores", [False, True])
def test_right_rows_raise_no_alarm(with_scores):
    for seed in range(3):
        sequences = made(seed)
        found = localise(indexer_of(sequences), suspect_of(sequences, with_scores=with_scores))
        assert not found.differs
        assert (found.stage, found.by_reference) == ("", 1.0)


@pytest.mark.slow
def test_a_hundred_thousand_right_rows_raise_no_alarm():
    """In float32, with sums in another order, ties broken the other way, and by choices alone."""
    rows = 0
    for seed in range(220):
        sequences = made(seed, (512,))
        scores = index_scores(sequences[0], IndexerForm())
        backwards = chosen(scores.flip(1))
        indices = (511 - backwards).masked_fill(backwards < 0, -1)
        found = localise(indexer_of(sequences), Suspect(indices, scores if seed % 2 else None))
        assert not found.differs, seed
        rows += found.rows
    assert rows > 100_000


def test_scores_are_those_of_loops_in_float64():
    inputs = made(8)[1].double()
    for form, mistake in (
        (IndexerForm(), {}),
        (IndexerForm(rotary="interleaved", relu="none"), {"layout": "interleaved", "relu": False}),
        (IndexerForm(key_shift=3, ahead=-1), {"shift": 3, "ahead": -1}),
        (IndexerForm(base=500.0, norm="rms", eps=0.01), {"base": 500.0, "center": False, "eps": 0.01}),
        (IndexerForm(chunk=8, heads="equal", direction=-1), {"chunk": 8, "equal": True, "sign": -1}),
    ):
        by_loops = port(inputs, **mistake).double()
        found = index_scores(inputs, form)
        assert torch.equal(found == -torch.inf, by_loops == -torch.inf)
        finite = found > -torch.inf
        torch.testing.assert_close(found[finite], by_loops[finite], rtol=0, atol=1e-5)


def test_few_rows_decide_nothing():
    sequences = made(9, (7,))
    found = localise(indexer_of(sequences), suspect_of(sequences, causal=False))
    assert (found.differs, found.rows) == (False, 1)
