"""What truncation at k changes in outputs and stream, against models that are really run with the mask."""

import math

import pytest
import torch
import torch.nn.functional as F
from measurements_by_hand import k_sweep_tables
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.outputs import output_ks
from semdiag.presenting.answer import show
from semdiag.questions.k_sweep import QUESTION
from semdiag.questions.k_sweep.measure import KSweepPlan

WIDTH, HEADS = 8, 2


class Causal(nn.Module):
    """A layer of grouped causal attention, written by hand."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (
            nn.Parameter(1.5 * torch.randn(WIDTH, n, generator=generator, dtype=torch.float64)) for n in (8, 4, 4)
        )

    def forward(self, x):
        q, k, v = ((x @ w).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(HEADS, 1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def run(model, inputs):
    """Outputs of every attention, and what leaves the first block's attention, (B, H, L, D) and (B, L, d)."""
    calls = []
    with torch.no_grad(), watch_attention(model, calls.append):
        model(inputs)
    return calls


def changes(table, quantity, layer, head, k):
    rows = table[(table["layer"] == layer) & (table["head"] == head) & (table["quantity"] == quantity)]
    return rows[rows["k"] == k].iloc[0]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_first_layer_of_a_masked_encoder_moves_as_was_said(k, wild_encoder, padded_tokens):
    """Later layers have other inputs under a mask. In float64: rounding is far below the figures compared."""
    encoder, tokens = wild_encoder("full"), padded_tokens[0]
    table, streams = k_sweep_tables(encoder, tokens, None, KSweepPlan(6), dtype=torch.float64)["sweep"], []
    block = encoder.blocks[0]
    hooks = [
        block.register_forward_pre_hook(lambda _, given: streams.append(given[0])),
        block.attention.register_forward_hook(lambda _, given, out: streams.append(streams[-1] + out)),
    ]
    before, others = run(encoder, tokens)[0], {layer: semdiag.TopK(12) for layer in range(1, len(encoder.blocks))}
    for head in range(encoder.config.heads):
        own = [k if head == other else 12 for other in range(encoder.config.heads)]
        with semdiag.sparsify(encoder, {0: semdiag.TopK(own), **others}):
            after = run(encoder, tokens)[0]
        dropping = before.counted[:, head] & (before.counted.sum(-1)[:, head, None] > k)
        moved, size = (after.mixed - before.mixed)[:, head].norm(dim=-1), before.mixed[:, head].norm(dim=-1)
        found = changes(table, "head_change", 0, head, k)
        assert found["mean"] == pytest.approx((moved / size)[dropping].mean().item(), rel=1e-9)
        assert found["queries"] - found["undefined"] == dropping.sum()
        added = (streams[-1] - streams[1]).norm(dim=-1) / streams[1].norm(dim=-1)
        found = changes(table, "stream_change", 0, head, k)
        assert found["mean"] == pytest.approx(added[dropping].mean().item(), rel=1e-9)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_so_do_grouped_causal_heads_of_any_model_and_of_its_stream_nothing_is_said(k):
    model, x = Causal(), torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table = k_sweep_tables(model, x, None, KSweepPlan(5), dtype=torch.float64)["sweep"]
    assert "stream_change" not in set(table["quantity"])
    before = run(model, x)[0].mixed
    with semdiag.sparsify(model, semdiag.TopK(k)):
        after = run(model, x)[0].mixed
    relative = ((after - before).norm(dim=-1) / before.norm(dim=-1))[:, :, k:]  # query i has i + 1 keys
    found = changes(table, "head_change", -1, -1, k)
    assert found["mean"] == pytest.approx(relative.mean().item(), rel=1e-9)
    assert found["p95"] == pytest.approx(relative.quantile(0.95).item(), rel=1e-9)


def test_the_weight_without_the_first_key_is_that_of_a_row_without_it():
    model, x = Causal(), torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table, (call,) = k_sweep_tables(model, x, None, KSweepPlan(2), dtype=torch.float64)["sweep"], run(model, x)
    scores, kept = call.scores(torch.float64), []
    for b, h, i in torch.ones(3, HEADS, 7).nonzero().tolist():
        if i >= 2:
            z = scores[b, h, i, : i + 1]
            best = [j for j in z.argsort(descending=True)[:2].tolist() if j != 0]
            kept.append(sum(z[1:].softmax(0)[j - 1].item() for j in best))
    found = changes(table, "weight_kept_without_first", -1, -1, 2)["mean"]
    assert found == pytest.approx(sum(kept) / len(kept), rel=1e-9)


def test_of_an_encoder_with_a_hook_of_ones_own_no_stream_is_known(wild_encoder, padded_tokens):
    """What a hook does to the output of a block nothing tells."""
    encoder = wild_encoder("full")
    encoder.blocks[0].attention.register_forward_hook(lambda module, given, out: 2 * out)
    quantities = set(k_sweep_tables(encoder, padded_tokens[0], None, KSweepPlan(3))["sweep"]["quantity"])
    assert "head_change" in quantities
    assert "stream_change" not in quantities


def test_a_top_k_model_that_is_run_moves_its_stream_by_its_own_keys(wild_encoder, padded_tokens):
    encoder = wild_encoder("topk")
    for rerun in (False, True):
        found = k_sweep_tables(encoder, *padded_tokens, KSweepPlan(2, rerun=rerun))["sweep"]
        assert ("stream_change" in set(found["quantity"])) == rerun


def test_of_drawn_queries_the_changes_are_estimated(wild_encoder, padded_tokens):
    encoder, tokens = wild_encoder("full"), padded_tokens[0].clamp(max=1)
    whole = k_sweep_tables(encoder, tokens, None, KSweepPlan(2), dtype=torch.float64)["sweep"]
    drawn = k_sweep_tables(encoder, tokens, None, KSweepPlan(2), dtype=torch.float64, queries=6, seed=1)
    estimates = drawn["sweep_estimates"]
    for quantity in ("head_change", "stream_change", "weight_kept_without_first"):
        some = estimates[(estimates["quantity"] == quantity) & (estimates["statistic"] == "mean")]
        assert len(some)
        one, all_of = changes(drawn["sweep"], quantity, -1, -1, 2), changes(whole, quantity, -1, -1, 2)
        assert one["queries"] == all_of["queries"] / 2
        assert all_of["p0"] <= one["mean"] <= all_of["p100"]
        assert math.isfinite(one["mean"])


def test_which_k_are_worked_out():
    assert output_ks(3, ()) == (1, 2, 3)
    assert output_ks(48, (9, 64))[7:10] == (8, 9, 12)
    assert output_ks(48, (9, 64))[-1] == 48


@pytest.mark.slow
def test_tables_and_json_hold_the_changes_beside_the_weight(wild_encoder, padded_tokens, monkeypatch, capsys):
    """A model of which no stream is known has no column for it."""
    monkeypatch.setenv("COLUMNS", "200")
    x = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for model, given, known in ((wild_encoder("full"), padded_tokens, True), (Causal(), (x,), False)):
        plan = KSweepPlan(3, rerun=True, ks=(1, 2))
        findings = Findings(semdiag.k_sweep(model, *given, plan=plan))
        show(QUESTION.answered(findings), every=True)
        shown = capsys.readouterr().out
        assert shown.count("change of head  ") == 2  # headings
        assert shown.count("hange of stream") == (2 if known else 1)  # in two tables, or in the reason why not
        assert ("Change of stream is left out: " in shown) != known
        (result,) = QUESTION.json(findings)["results"]
        swept = {(r["quantity"], r["k"]): r["mean"] for r in result["sweep"] if r["layer"] == -1}
        for row in result["rerun"]:
            for name in ("weight_kept", "weight_kept_without_first", "head_change", "stream_change"):
                there = row["mask"] == "topk" and (known or name != "stream_change")
                assert row[name] == (swept[name, row["k"]] if there else None), (row["mask"], name)
