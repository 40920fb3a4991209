"""Clean and noisy rows of the same inputs: the table against loops, and every bound against the table."""

import math

import numpy as np
import pytest
import torch

from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.table import column_types
from semdiag.questions.stability import measure as perturbation
from semdiag.questions.stability.measure import SECANTS, SecantsPlan, measure_secants, noisy_copies, with_bounds
from semdiag_files import InputError


def naive(encoder, tokens, level, seed=0):
    """Rows {(sample, layer, head, query): values}, one sample at a time and by loops."""
    ids = encoder.sequence(tokens)
    noise = torch.randn((*ids.shape, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = {}
    for sample, row in enumerate(tokens):
        seen = []
        embedded = encoder.embed(row[None])
        noisy = embedded + level * embedded.square().mean(-1, keepdim=True).sqrt() * noise[sample]
        with torch.no_grad(), watch_attention(encoder, seen.append):
            for x in (embedded, noisy):
                for block in encoder.blocks:
                    x = block(x, encoder.valid(row[None]))
        layers = len(encoder.blocks)
        for layer, (clean, other) in enumerate(zip(seen[:layers], seen[layers:], strict=True)):
            for head in range(encoder.config.heads):
                valid = [i for i, token in enumerate(ids[sample]) if token != 2]
                for i in valid:
                    found[sample, layer, head, i] = row_pair(clean, other, valid, head, i)
    return found


def row_pair(clean, other, valid, head, i):
    ends = []
    for call in (clean, other):
        z = {j: call.scale * float(call.q[0, head, i] @ call.k[0, head, j]) for j in valid}
        inside = valid if call.selected is None else [j for j in call.selected[0, head, i].tolist() if j >= 0]
        total = sum(math.exp(z[j]) for j in inside)
        p = {j: math.exp(z[j]) / total for j in inside}
        gap = min(z[j] for j in inside) - max((z[j] for j in valid if j not in inside), default=-math.inf)
        ends.append((z, set(inside), p, max(z[j] for j in inside) - min(z[j] for j in inside), gap))
    (z, s, p, d, g), (z2, s2, p2, d2, g2) = ends
    moved = [abs(z[j] - z2[j]) for j in s | s2]
    uneven = max(z[j] - z2[j] for j in s | s2) - min(z[j] - z2[j] for j in s | s2)
    others = [sorted(q.values())[:-1] for q in (p, p2)]
    odds = [math.log(max(q.values()) / sum(o)) if o else math.inf for q, o in zip((p, p2), others, strict=True)]
    change = sum(abs(p.get(j, 0) - p2.get(j, 0)) for j in s | s2)
    return [len(s), change, sum(moved), max(moved), uneven, sum(odds) / 2, s == s2, max(d, d2), min(g, g2)]


@pytest.mark.parametrize("per_pass", [2**22, 1])
def test_the_table_is_as_defined(kind, wild_encoder, padded_tokens, monkeypatch, per_pass):
    monkeypatch.setattr(perturbation, "_SCORES", per_pass)
    encoder, (tokens, _) = wild_encoder(kind), padded_tokens
    table = measure_secants(encoder, [tokens], levels=[0.1])
    assert column_types(table) == SECANTS.columns
    assert set(table["model"]) == {"model"}
    assert set(table["level"]) == {0.1}
    expected = naive(encoder, tokens, 0.1)
    found = table.set_index(["sample", "layer", "head", "query"]).drop(columns=["model", "level"])
    assert sorted(found.index) == sorted(expected)
    values = np.array([[float(v) for v in expected[place]] for place in found.index])
    np.testing.assert_allclose(found.to_numpy(float), values, rtol=1e-7, atol=1e-9)
    if encoder.config.attention == "topk":
        assert not found["same_set"].all()


def test_noise_is_the_same_at_every_level_but_for_its_size(wild_encoder, padded_tokens):
    tables = measure_secants(wild_encoder("full"), [padded_tokens[0]], levels=[1e-6, 2e-6])
    small, large = (rows["score_change"].to_numpy() for _, rows in tables.groupby("level"))
    np.testing.assert_allclose(large[small > 0], 2 * small[small > 0], rtol=1e-2)


def test_samples_and_seed(wild_encoder, padded_tokens):
    encoder, tokens = wild_encoder("topk"), padded_tokens[0]
    one, same, other = (measure_secants(encoder, [tokens], samples=2, seed=s) for s in (1, 1, 2))
    assert set(one["sample"]) == {0, 1}
    assert one.equals(same)
    assert not one.equals(other)


@pytest.mark.parametrize("size", [0.5, 1.5, 4.0])
def test_no_secant_exceeds_a_sound_bound(kind, wild_encoder, padded_tokens, size):
    encoder = wild_encoder(kind, size)
    table = measure_secants(encoder, [padded_tokens[0]], levels=[1e-4, 0.01, 0.3])
    assert_bounded(table, encoder.config.attention)


@pytest.mark.parametrize("which", [0, 1])
def test_no_secant_of_a_trained_model_exceeds_a_sound_bound(tiny_models, which):
    model = tiny_models[which]
    tokens = model.default_inputs(40, 0)[0]
    assert_bounded(measure_secants(model.module, [tokens], levels=[0.01, 0.5]), model.module.config.attention)


def assert_bounded(table, kind):
    rows = with_bounds(table, kind)
    for bound in ("ln_sound", "ln_pair", "ln_row"):
        distance = "score_change_max" if bound == "ln_row" else "score_change"
        known = np.isfinite(rows[bound]) | (rows[bound] == -math.inf)
        assert known.mean() > 0.9
        promised = np.exp(rows[bound][known]) * rows[distance][known]
        assert (rows["weight_change"][known] <= promised * (1 + 1e-9) + 1e-13).all()


def test_nothing_is_left_behind(kind, wild_encoder, padded_tokens, untouched):
    encoder = wild_encoder(kind).float().train()
    check = untouched(encoder)
    measure_secants(encoder, [padded_tokens[0]])
    check()


def test_hooks_go_after_an_exception(wild_encoder, padded_tokens, untouched):
    encoder = wild_encoder("full")
    check = untouched(encoder)
    wrong = torch.zeros(1, 3, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError), noisy_copies(encoder.blocks[0], 1, lambda copies: copies.add_(wrong)):
        encoder(padded_tokens[0][:2])
    check()


@pytest.mark.parametrize("level", [0.0, -1.0, math.inf, math.nan])
def test_a_level_that_no_noise_has_is_refused(level):
    with pytest.raises(InputError, match="noise level must be a positive number"):
        SecantsPlan((level,))


def test_no_level_gives_an_empty_table(wild_encoder, padded_tokens):
    table = measure_secants(wild_encoder("full"), [padded_tokens[0]], levels=[])
    assert table.empty
    assert list(table) == list(SECANTS.columns)
