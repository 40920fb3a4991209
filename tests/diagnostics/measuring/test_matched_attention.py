"""Models with hashed, clustered and redrawn attention are measured like any other."""

import math

import numpy as np
import pytest
import torch

from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.measuring.measure import measure
from semdiag.measuring.measurements import Measurements
from semdiag.questions.mask_stability.mask_rows import Workspace, row_changes, selection_of
from semdiag.questions.mask_stability.measure import NoisePlan, mask_stability
from semdiag_models import Encoder

KINDS = {
    "lsh": ("lsh", {"hash_rounds": 2}),
    "lsh, asymmetric, CLS": ("lsh", {"hashes": "asymmetric", "pooling": "cls"}),
    "routing": ("routing", {}),
    "redrawn": ("redrawn", {}),
}


@pytest.fixture(params=KINDS)
def encoder(request, tiny_config):
    attention, fields = KINDS[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Encoder(tiny_config(attention, 3, **fields)).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
    return model.with_draws(5)


def test_the_tables_hold_what_the_captured_sets_say(encoder, padded_tokens):
    tokens, calls = padded_tokens[0], []
    with torch.no_grad(), watch_attention(encoder, calls.append):
        encoder(tokens)
    found = measure(encoder, tokens)
    assert found.models["residual"].item() < 1e-14
    assert found.models["attention"].item() == encoder.config.attention
    rows = {
        (row["layer"], row["sample"], row["head"], row["query"]): row for row in found.queries.to_dict("records")
    }
    loads = {
        (row["layer"], row["sample"], row["head"], row["key"]): row["load"]
        for row in found.loads.to_dict("records")
    }
    valid, seen = encoder.valid(tokens), set()
    for layer, call in enumerate(calls):
        scores = call.scale * call.q @ call.k.transpose(2, 3)
        for b, h in torch.cartesian_prod(torch.arange(len(tokens)), torch.arange(call.q.shape[1])).tolist():
            real = [i for i in range(call.q.shape[2]) if valid is None or valid[b, i]]
            load = dict.fromkeys(real, 0)
            for i in real:
                row, z = rows[layer, b, h, i], scores[b, h, i].tolist()
                kept = {j for j in call.selected[b, h, i].tolist() if j >= 0}
                seen.add((layer, b, h, i))
                assert kept <= set(real)
                assert (row["keys"], row["kept"]) == (len(real), len(kept))
                for j in kept:
                    load[j] += 1
                dropped = [z[j] for j in real if j not in kept]
                if not kept:
                    assert math.isnan(row["dispersion"])
                    assert math.isnan(row["separation"])
                    continue
                inside = [z[j] for j in kept]
                assert row["dispersion"] == pytest.approx(max(inside) - min(inside), abs=1e-12)
                assert row["separation"] == pytest.approx(min(inside) - max(dropped, default=-math.inf), abs=1e-12)
                if encoder.config.attention != "redrawn":
                    best = sorted(real, key=lambda j: -z[j])[:3]
                    assert row["recall"] == pytest.approx(len(kept & {*best}) / len(best))
            assert {j: loads[layer, b, h, j] for j in real} == load
    assert seen == set(rows)
    assert ("recall" in found.queries) == (encoder.config.attention != "redrawn")


def test_tables_of_other_kinds_go_together_with_them(encoder, padded_tokens, tiny_config, tmp_path):
    parts = []
    for name, model in (("one", encoder), ("full", Encoder(tiny_config()).eval())):
        part = measure(model, padded_tokens[0])
        tables = "models", "queries", "loads", "heads", "history", "non_finite", "calls", "remarks", "skipped"
        for table in tables:
            frame = getattr(part, table)
            frame["model"] = name
        parts.append(part)
    both = Measurements.concat(parts)
    both.save(tmp_path / "both")
    again = Measurements.load(tmp_path / "both")
    assert again.queries["dispersion"].notna().sum() == both.queries["dispersion"].notna().sum()


def call_of(q, k, selected, valid):
    allowed = None if valid is None else valid[:, None, None, :]
    return AttentionCall("attention", 0, q, k, k, 0.7, allowed, valid, selected, q)


@pytest.mark.parametrize("padded", [False, True])
def test_masks_under_noise_are_compared_as_sets_of_any_size(padded):
    """Two samples, two draws, two levels of noise; sets drawn at random, some empty."""
    generator = torch.Generator().manual_seed(3)
    samples, copies, heads, length = 2, 4, 2, 7
    q, k = torch.randn(2, samples * (1 + copies), heads, length, 4, generator=generator, dtype=torch.float64)
    valid = torch.ones(len(q), length, dtype=torch.bool)
    if padded:
        valid[::2, 5:] = False  # sample 0 and its copies
    order = torch.rand(len(q), heads, length, length, generator=generator).masked_fill(~valid[:, None, None], 2)
    chosen = order.sort(-1)
    selected = chosen.indices.masked_fill(chosen.values > 1, -1)[..., :4]
    selected = selected.masked_fill(torch.rand(selected.shape, generator=generator) < 0.4, -1)
    selected[samples : samples + 1] = selected[:1]  # the first copy of sample 0 keeps what it kept
    call = call_of(q, k, selected, valid if padded else None)
    found = row_changes(call, samples, 2, 2, 5, selection_of("lsh"), Workspace())
    assert not found.certified.any()
    assert found.swing.isnan().all()
    scores = 0.7 * q @ k.transpose(2, 3)

    def weights(at, h, i):
        kept = [j for j in selected[at, h, i].tolist() if j >= 0]
        z = np.exp(scores[at, h, i].numpy())
        p = np.zeros(length)
        p[kept] = z[kept] / z[kept].sum()
        return set(kept), p

    compared = 0
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in (samples, heads, length))).tolist():
        real = [j for j in range(length) if valid[b, j]]
        kept, p = weights(b, h, i)
        counted = i in real and 0 < len(kept) < len(real)
        assert found.counted[b, h, i].item() == counted
        if not counted:
            continue
        compared += 1
        assert found.kept[b, h, i] == len(kept)
        z = scores[b, h, i].tolist()
        gap = min(z[j] for j in kept) - max(z[j] for j in real if j not in kept)
        assert found.separation[b, h, i].item() == pytest.approx(gap, abs=1e-12)
        for draw in range(2):
            for level in range(2):
                after, other = weights(samples * (1 + 2 * draw + level) + b, h, i)
                assert found.common[draw, level, b, h, i] == len(kept & after)
                assert found.changed[draw, level, b, h, i].item() == (kept != after)
                if draw == 0:
                    response = np.abs(p - other).sum()
                    assert found.response[level, b, h, i].item() == pytest.approx(response, abs=1e-12)
    assert compared > 10
    assert not found.changed[0, 0, 0].any()


@pytest.mark.parametrize("kind", ["lsh", "routing"])
def test_noise_that_is_too_small_to_matter_changes_no_mask(kind, wild_encoder, padded_tokens):
    masks, effects = mask_stability(wild_encoder(kind), *padded_tokens, NoisePlan((1e-13,)), dtype=torch.float64)
    assert (masks[["agreement", "exact"]] == 1).all(axis=None)
    assert (masks["certified"] == 0).all()
    assert masks["predicted"].isna().all()
    assert (effects["flipped"] == 0).all()
