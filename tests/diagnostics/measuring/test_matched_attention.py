"""Models with hashed, clustered and redrawn attention are measured like any other."""

import math

import pytest
import torch

from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.measure import measure
from semdiag.measuring.measurements import Measurements
from semdiag.questions.mask_stability.measure import NoisePlan, noise_tables
from semdiag_models import Encoder

KINDS = {
    "lsh": ("lsh", {"hash_rounds": 2}),
    "lsh, asymmetric, CLS": ("lsh", {"hashes": "asymmetric", "pooling": "cls"}),
    "routing": ("routing", {}),
    "redrawn": ("redrawn", {}),
    "indexer": ("indexer", {"indexer_width": 4}),
    "moba": ("moba", {}),
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


@pytest.mark.slow
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


@pytest.mark.parametrize("kind", ["lsh", "routing", "indexer", "moba"])
def test_masks_that_scores_do_not_determine_are_not_put_under_noise(kind, wild_encoder, padded_tokens):
    with pytest.raises(NotAvailableError, match=f"do not say which keys {kind} attention keeps"):
        noise_tables(wild_encoder(kind), *padded_tokens, NoisePlan((0.1,)))
