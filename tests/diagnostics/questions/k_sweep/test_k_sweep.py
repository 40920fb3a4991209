"""Every k of one model in one pass: against loops, and against the model really run with that k."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from measurements_by_hand import k_sweep_tables

from semdiag.capturing.attention_calls import watch_attention
from semdiag.mathematics.bounds.corollary import paper_input_condition, paper_weight_condition
from semdiag.mathematics.paper_stability import paper_heavy_hitter_stability
from semdiag.mathematics.softmax_stability import fixed_mask_stability, heavy_hitter_stability
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import measure
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.table import column_types
from semdiag.questions.k_sweep.changes import condition_table, conditions_met
from semdiag.questions.k_sweep.measure import K_SWEEP_TABLE, KSweepPlan
from semdiag_files import InputError
from semdiag_models import Encoder

LENGTH, LARGEST = 12, 7
PERCENTILE_COLUMNS = ["mean", "p0", "p25", "p50", "p95", "p100"]


def with_heavy_hitters(encoder, k):
    """An encoder with the same weights, made with top-k attention."""
    swapped = Encoder(replace(encoder.config, attention="topk", k=k)).double()
    swapped.load_state_dict(encoder.state_dict())
    return swapped.eval()


def naive(encoder, tokens):
    """Values {(layer, head, k, quantity): list} by loops over rows of scores."""
    calls, found, seen = [], {}, []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0][0])) for block in encoder.blocks
    ]
    hooks += [
        block.attention.register_forward_hook(lambda _, given, out: seen.append(out[0]))
        for block in encoder.blocks
    ]
    with torch.no_grad(), watch_attention(encoder, calls.append):
        for row in tokens:
            encoder(row[None])
    for hook in hooks:
        hook.remove()
    layers = len(encoder.blocks)
    for at, call in enumerate(calls):
        valid = [j for j in range(LENGTH) if tokens[at // layers][j] != 2]
        stream = (seen[2 * at] + seen[2 * at + 1]).norm(dim=-1)
        width = encoder.config.head_width
        attends_as_swept = call.selected is None
        for head in range(encoder.config.heads):
            place = (call.layer, head)
            loads = {(k, j): 0 for k in range(1, LARGEST + 1) for j in valid}
            for i in valid:
                z = {j: call.scale * float(call.q[0, head, i] @ call.k[0, head, j]) for j in valid}
                own = row_quantities(z, loads)
                out = encoder.attention(call.layer).out.weight[:, head * width : (head + 1) * width].detach()
                values = call.v[0, head]
                moved = row_changes(z, values, out, float(stream[i]) if attends_as_swept else None)
                for k, quantity, value in (*own, *moved):
                    found.setdefault((*place, k, quantity), []).append(value)
            for (k, _), load in loads.items():
                found.setdefault((*place, k, "load"), []).append(load)
    return found


def row_quantities(z, loads):
    order = sorted(z, key=lambda j: -z[j])
    total, whole = sum(math.exp(v) for v in z.values()), z[order[0]] - z[order[-1]]
    yield 0, "dispersion", whole
    yield 0, "ln_sound", fixed_mask_stability(whole, len(z)).log_value.item()
    for k in range(1, LARGEST + 1):
        kept = order[:k]
        for j in kept:
            loads[k, j] += 1
        delta = z[kept[0]] - z[kept[-1]]
        gap = z[kept[-1]] - z[order[k]] if k < len(order) else math.inf
        yield k, "dispersion", delta
        drops = k < len(order)  # elsewhere there is nothing to keep a share of
        yield k, "ratio", delta / whole if whole and drops else math.nan
        yield k, "separation", gap
        yield k, "weight_kept", sum(math.exp(z[j]) for j in kept) / total if drops else math.nan
        yield k, "ln_sound", heavy_hitter_stability(delta, gap, len(kept)).log_value.item()
        yield k, "ln_paper", paper_heavy_hitter_stability(delta, gap, len(kept)).log_value.item()


def row_changes(z, values, out, stream):
    """What each k leaves without the first key, and what it changes: of the head's output, and of the stream."""
    order, p = sorted(z, key=lambda j: -z[j]), {j: math.exp(v) for j, v in z.items()}

    def mixed(keys):
        return sum(p[j] * values[j] for j in keys) / sum(p[j] for j in keys)

    whole = mixed(z)
    for k in range(1, LARGEST + 1):
        drops = k < len(order)
        others = sum(p[j] for j in z if j != min(z))
        besides = sum(p[j] for j in order[:k] if j != min(z)) / others if drops else math.nan
        yield k, "weight_kept_without_first", besides
        moved = mixed(order[:k]) - whole
        yield k, "head_change", float(moved.norm() / whole.norm()) if drops else math.nan
        if stream is not None:
            yield k, "stream_change", float((out @ moved).norm()) / stream if drops else math.nan


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "topk"])
@pytest.mark.parametrize("batch_size", [100, 2])
def test_the_table_is_as_defined(kind, wild_encoder, padded_tokens, batch_size):
    encoder, tokens = wild_encoder(kind), padded_tokens[0]
    table = k_sweep_tables(encoder, tokens, None, KSweepPlan(LARGEST), batch_size=batch_size, dtype=torch.float64)[
        "sweep"
    ]
    assert column_types(table) == K_SWEEP_TABLE.columns
    expected = naive(encoder, tokens)
    for (_, _, k, quantity), values in list(expected.items()):
        expected.setdefault((-1, -1, k, quantity), []).extend(values)
    found = table.set_index(["layer", "head", "k", "quantity"])
    assert sorted(found.index) == sorted(expected)
    for place, row in found.iterrows():
        want = percentiles(expected[place])
        assert (row["queries"], row["undefined"]) == (want["queries"], want["undefined"])
        for column in PERCENTILE_COLUMNS:
            assert row[column] == pytest.approx(want[column], rel=1e-6, abs=1e-8, nan_ok=True), (place, column)


def test_more_keys_keep_more_mass_and_more_dispersion(wild_encoder, padded_tokens):
    table = k_sweep_tables(wild_encoder("full"), padded_tokens[0].clamp(max=1))[
        "sweep"
    ]  # without PAD all have as many keys
    assert table["k"].max() == LENGTH - 1
    pooled = table[table["layer"] == -1]
    for quantity in ("weight_kept", "ratio"):
        rows = pooled[(pooled["quantity"] == quantity) & (pooled["k"] > 0)].sort_values("k")
        assert (np.diff(rows["p50"]) >= 0).all()
        assert rows["p100"].max() <= 1


def test_a_rerun_is_that_of_a_model_with_this_k(wild_encoder, padded_tokens):
    encoder, (tokens, labels) = wild_encoder("full"), padded_tokens
    table = k_sweep_tables(encoder, tokens, labels, KSweepPlan(4, rerun=True), dtype=torch.float64)["rerun"]
    with torch.no_grad():
        before = encoder(tokens).argmax(-1)
        for k in range(5):
            swapped = encoder if k == 0 else with_heavy_hitters(encoder, k)
            after = swapped(tokens).argmax(-1)
            rows = table[(table["k"] == k) & (table["mask"] != "random")].sum(numeric_only=True)
            assert rows["correct"] == (after == labels).sum().item()
            assert rows["changed"] == (after != before).sum().item()


def test_of_a_model_that_is_run_again_everything_is_over_the_keys_that_its_own_mask_keeps(
    wild_encoder, padded_tokens
):
    encoder, (tokens, labels) = wild_encoder("topk"), padded_tokens
    own, calls = encoder.config.k, []
    plan = KSweepPlan(LARGEST, rerun=True)
    tables = k_sweep_tables(encoder, tokens, labels, plan, dtype=torch.float64)
    assert sorted(set(tables["rerun"]["k"])) == list(range(own))  # larger ones would drop nothing
    pooled = tables["sweep"][tables["sweep"]["layer"] == -1].set_index(["quantity", "k"])["mean"]
    assert set(tables["sweep"]["k"]) == set(range(own))
    with torch.no_grad(), watch_attention(encoder, calls.append):
        encoder(tokens)
    mass, range_kept = {1: [], 2: []}, []
    for call in calls:
        scores = call.scores(torch.float64)
        for b, h, i in call.counted.nonzero().tolist():
            z = scores[b, h, i, call.selected[b, h, i][call.selected[b, h, i] >= 0]].sort(descending=True).values
            range_kept.append(float(z[0] - z[-1]))
            for k in (1, 2):
                if len(z) > k:
                    mass[k].append(float(z.softmax(0)[:k].sum()))
    for k in (1, 2):
        assert pooled["weight_kept", k] == pytest.approx(np.mean(mass[k]), rel=1e-9)
    assert pooled["dispersion", 0] == pytest.approx(np.mean(range_kept), rel=1e-9)


@pytest.mark.parametrize(("max_k", "ks", "swept"), [(2, (5,), 5), (None, (3, 12), 11), (4, (1,), 4)])
def test_every_k_that_is_run_is_measured(wild_encoder, padded_tokens, max_k, ks, swept):
    """Above the sweep's largest k a run had no share of the keys, and was "not without loss" for want of it."""
    table = k_sweep_tables(wild_encoder("full"), padded_tokens[0], None, KSweepPlan(max_k, rerun=True, ks=ks))[
        "sweep"
    ]
    assert table["k"][table["quantity"] == "weight_kept"].max() == swept


def test_more_keys_than_there_are_cannot_be_run(wild_encoder, padded_tokens):
    with pytest.raises(InputError, match=r"^k must lie in 1 … 12, the most keys of a query here\. Got k=40\.$"):
        k_sweep_tables(wild_encoder("full"), padded_tokens[0], None, KSweepPlan(rerun=True, ks=(3, 40)))["sweep"]


def test_queries_with_few_keys_are_left_out(wild_encoder, padded_tokens):
    encoder, tokens = wild_encoder("full"), padded_tokens[0]
    some = k_sweep_tables(encoder, tokens, None, KSweepPlan(3), min_keys=10)["sweep"]
    pooled = some[some["layer"] == -1].set_index(["quantity", "k"])
    long = [int((row != 2).sum()) for row in tokens if (row != 2).sum() >= 10]
    assert pooled["queries"]["weight_kept", 3] == sum(long) * len(encoder.blocks) * encoder.config.heads
    whole = k_sweep_tables(encoder, tokens[[1, 4, 5, 6]], None, KSweepPlan(3))[
        "sweep"
    ]  # the samples with 10 keys or more
    alone = whole[whole["layer"] == -1].set_index(["quantity", "k"])
    for quantity in ("weight_kept", "dispersion", "ratio"):
        assert pooled["p50"][quantity, 3] == pytest.approx(alone["p50"][quantity, 3], rel=1e-6)


@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("kind", ["full", "topk"])
def test_nothing_is_left_behind(kind, wild_encoder, padded_tokens, untouched, rerun):
    encoder = wild_encoder(kind).float().train()
    check = untouched(encoder)
    k_sweep_tables(encoder, *padded_tokens, KSweepPlan(3, rerun))["sweep"]
    check()


@pytest.mark.parametrize("kind", ["banded", "block"])
def test_a_fixed_mask_is_not_swept(kind, wild_encoder, padded_tokens):
    assert k_sweep_tables(wild_encoder(kind), padded_tokens[0])["sweep"].equals(K_SWEEP_TABLE.empty())


def test_a_k_that_drops_nothing_is_refused(wild_encoder, padded_tokens):
    with pytest.raises(InputError, match="below the number of keys, at most 12"):
        k_sweep_tables(wild_encoder("full"), padded_tokens[0], None, KSweepPlan(12))["sweep"]
    with pytest.raises(InputError, match="at least 1"):
        KSweepPlan(0)


def swept(encoder, padded_tokens, **plan):
    """Measurements of one model with its sweep."""
    tokens, labels = padded_tokens
    found = measure(encoder, tokens, labels=labels)
    return found.replace(
        sweep=k_sweep_tables(encoder, tokens, labels, KSweepPlan(**plan), dtype=torch.float64)["sweep"]
    )


@pytest.mark.slow
def test_conditions_are_those_of_the_corollary_at_matching_percentiles(wild_encoder, padded_tokens):
    encoder = wild_encoder("full", 0.7)
    found = swept(encoder, padded_tokens, max_k=3)
    values = naive(encoder, padded_tokens[0])
    pooled = {}
    for (_, _, k, quantity), some in values.items():
        pooled.setdefault((k, quantity), []).extend(some)
    table = condition_table(Findings(found)).set_index(["k", "percentile", "parameter"])["left_side"]
    for k in (1, 2, 3):
        for p in (75, 90, 95, 100):
            full, delta, load = (
                np.percentile(pooled[at], p) for at in ((0, "dispersion"), (k, "dispersion"), (k, "load"))
            )
            gaps = np.array(pooled[k, "separation"])
            gap = np.percentile(gaps[np.isfinite(gaps)], 100 - p)
            weight, inputs = (
                paper_weight_condition(full, delta, gap),
                paper_input_condition(full, delta, gap, load / k),
            )
            assert table[k, p, "W"] == pytest.approx(weight.left_side.item(), rel=1e-6)
            assert table[k, p, "X"] == pytest.approx(inputs.left_side.item(), rel=1e-6)


def test_a_tie_within_rounding_meets_no_condition(wild_encoder, padded_tokens):
    """As in Corollary 1 over pairs: two forms of one rule would disagree."""
    found = swept(wild_encoder("full", 0.7), padded_tokens, max_k=2)
    smallest = found.sweep["p0"].mask(found.sweep["quantity"] == "separation", 1e-17)
    table = condition_table(Findings(found.replace(sweep=found.sweep.assign(p0=smallest))))
    at_the_tie = table[table["percentile"] == 100]
    assert (at_the_tie["left_side"] == np.inf).all()
    assert not at_the_tie["met"].any()


def test_cases_that_meet_the_conditions_are_counted(wild_encoder, padded_tokens):
    findings = Findings(swept(wild_encoder("full", 0.7), padded_tokens, max_k=3))
    table, met = findings(condition_table), conditions_met(findings, "model")
    assert sorted(met) == [1, 2, 3]
    judged = table[table["percentile"] < 100]
    assert all(met[k] == judged[judged["k"] == k]["met"].sum() for k in met)
    assert len(table) == 3 * 8
