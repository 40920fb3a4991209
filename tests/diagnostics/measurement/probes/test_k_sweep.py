"""Every k of one model in one pass: against loops, against the model really run with that k, and its words."""

import math
import re

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag.capturing.attention_calls import watch_attention
from semdiag.findings.findings import Findings
from semdiag.findings.k_sweep import condition_table, recommendation, sweep_summary
from semdiag.mathematics.corollary import paper_input_condition, paper_weight_condition
from semdiag.mathematics.paper_stability import paper_heavy_hitter_stability
from semdiag.mathematics.softmax_stability import fixed_mask_stability, heavy_hitter_stability
from semdiag.measurement.measure import measure
from semdiag.measurement.percentiles import percentiles
from semdiag.measurement.probes.k_sweep import SWEEP, SweepPlan, k_sweep, with_heavy_hitters
from semdiag_models import InputError

LENGTH, LARGEST = 12, 7
PERCENTILE_COLUMNS = ["mean", "p0", "p25", "p50", "p95", "p100"]


def naive(encoder, tokens):
    """Values {(layer, head, k, quantity): list} by loops over rows of scores."""
    calls, found = [], {}
    with torch.no_grad(), watch_attention(encoder, calls.append):
        for row in tokens:
            encoder(row[None])
    layers = len(encoder.blocks)
    for at, call in enumerate(calls):
        valid = [j for j in range(LENGTH) if tokens[at // layers][j] != 2]
        for head in range(encoder.config.heads):
            place = (call.layer, head)
            loads = {(k, j): 0 for k in range(1, LARGEST + 1) for j in valid}
            for i in valid:
                z = {j: call.scale * float(call.q[0, head, i] @ call.k[0, head, j]) for j in valid}
                for k, quantity, value in row_quantities(z, loads):
                    found.setdefault((*place, k, quantity), []).append(value)
            for (k, _), load in loads.items():
                found.setdefault((*place, k, "load"), []).append(load)
    return found


def row_quantities(z, loads):
    order = sorted(z, key=lambda j: -z[j])
    total, whole = sum(math.exp(v) for v in z.values()), z[order[0]] - z[order[-1]]
    full = fixed_mask_stability(whole, len(z)).log_value.item()
    yield 0, "dispersion", whole
    yield 0, "ln_sound", full
    for k in range(1, LARGEST + 1):
        kept = order[:k]
        for j in kept:
            loads[k, j] += 1
        delta = z[kept[0]] - z[kept[-1]]
        gap = z[kept[-1]] - z[order[k]] if k < len(order) else math.inf
        sound = heavy_hitter_stability(delta, gap, len(kept)).log_value.item()
        yield k, "dispersion", delta
        yield k, "ratio", delta / whole if whole else math.nan
        yield k, "separation", gap
        yield k, "mass", sum(math.exp(z[j]) for j in kept) / total
        yield k, "ln_sound", sound
        yield k, "ln_paper", paper_heavy_hitter_stability(delta, gap, len(kept)).log_value.item()
        yield k, "sound_better", float(sound < full)


@pytest.mark.parametrize("kind", ["full", "topk"])
@pytest.mark.parametrize("batch_size", [100, 2])
def test_the_table_is_as_defined(kind, wild_encoder, padded_tokens, batch_size):
    encoder, tokens = wild_encoder(kind), padded_tokens[0]
    table = k_sweep(encoder, tokens, None, SweepPlan(LARGEST), batch_size=batch_size, dtype=torch.float64)
    assert {name: str(t) for name, t in table.dtypes.items()} == SWEEP.columns
    expected = naive(encoder, tokens)
    for (_, _, k, quantity), values in list(expected.items()):
        expected.setdefault((-1, -1, k, quantity), []).extend(values)
    found = table.set_index(["layer", "head", "k", "quantity"])
    assert sorted(found.index) == sorted(expected)
    for place, row in found.iterrows():
        want = percentiles(expected[place])
        assert row["queries"] == want["queries"]
        for column in PERCENTILE_COLUMNS:
            assert row[column] == pytest.approx(want[column], rel=1e-6, abs=1e-8, nan_ok=True), (place, column)


def test_more_keys_keep_more_mass_and_more_dispersion(wild_encoder, padded_tokens):
    table = k_sweep(wild_encoder("full"), padded_tokens[0])
    assert table["k"].max() == LENGTH - 1
    pooled = table[table["layer"] == -1]
    for quantity in ("mass", "ratio"):
        rows = pooled[(pooled["quantity"] == quantity) & (pooled["k"] > 0)].sort_values("k")
        assert (np.diff(rows["p50"]) >= 0).all()
        assert rows["p100"].max() <= 1


def test_a_rerun_is_that_of_a_model_with_this_k(wild_encoder, padded_tokens):
    encoder, (tokens, labels) = wild_encoder("full"), padded_tokens
    table = k_sweep(encoder, tokens, labels, SweepPlan(4, rerun=True), dtype=torch.float64)
    with torch.no_grad():
        before = encoder(tokens).argmax(-1)
        for k in range(5):
            swapped = encoder if k == 0 else with_heavy_hitters(encoder, k)
            after = swapped(tokens).argmax(-1)
            rows = table[(table["k"] == k) & (table["layer"] == -1)].set_index("quantity")["mean"]
            assert rows["accuracy"] == (after == labels).double().mean().item()
            assert rows["same_prediction"] == (after == before).double().mean().item()


@pytest.mark.parametrize("kind", ["full", "topk"])
def test_swapped_attention_keeps_the_k_largest_scores(kind, wild_encoder, padded_tokens):
    encoder, tokens, calls = wild_encoder(kind), padded_tokens[0], []
    swapped = with_heavy_hitters(encoder, 2)
    with torch.no_grad(), watch_attention(swapped, calls.append):
        swapped(tokens)
    assert all(call.selected.shape[-1] == 2 for call in calls)
    assert all(torch.equal(a, b) for a, b in zip(encoder.parameters(), swapped.parameters(), strict=True))
    whole = with_heavy_hitters(encoder, LENGTH)
    if kind == "full":
        with torch.no_grad():
            torch.testing.assert_close(whole(tokens), encoder(tokens))


@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("kind", ["full", "topk"])
def test_nothing_is_left_behind(kind, wild_encoder, padded_tokens, untouched, rerun):
    encoder = wild_encoder(kind).float().train()
    check = untouched(encoder)
    k_sweep(encoder, *padded_tokens, SweepPlan(3, rerun))
    check()


@pytest.mark.parametrize("kind", ["banded", "block"])
def test_a_fixed_mask_is_not_swept(kind, wild_encoder, padded_tokens):
    assert k_sweep(wild_encoder(kind), padded_tokens[0]).equals(SWEEP.empty())


def test_a_k_that_drops_nothing_is_refused(wild_encoder, padded_tokens):
    with pytest.raises(InputError, match="below the length of the inputs, 12"):
        k_sweep(wild_encoder("full"), padded_tokens[0], None, SweepPlan(12))
    with pytest.raises(InputError, match="at least 1"):
        SweepPlan(0)


def swept(encoder, padded_tokens, **plan):
    """Measurements of one model with its sweep."""
    tokens, labels = padded_tokens
    found = measure(encoder, tokens, labels=labels)
    return found.replace(sweep=k_sweep(encoder, tokens, labels, SweepPlan(**plan), dtype=torch.float64))


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


def made_sweep(made_up, mass, met, attention="full", accuracy=None):
    """A sweep with the median mass of every k, whose conditions are all met or all not met."""
    found = made_up(("m", np.ones(8), {"attention": attention, "k": None if attention == "full" else 5}))
    rows = [(0, "dispersion", 4.0)]
    for k, (kept, good) in enumerate(zip(mass, met, strict=True), start=1):
        rows += [
            (k, "mass", kept),
            (k, "dispersion", 0.1 if good else 5.0),
            (k, "separation", 0.5),
            (k, "load", k),
        ]
    rows += [(k, "accuracy", value) for k, value in enumerate(accuracy or [])]
    table = pd.DataFrame(rows, columns=["k", "quantity", "mean"])
    for column in SWEEP.columns:
        if column.startswith("p"):
            table[column] = table["mean"]
    table = table.assign(model="m", layer=-1, head=-1, queries=1000, undefined=0, not_positive=0)
    return Findings(found.replace(sweep=SWEEP.of_parts([table])))


@pytest.mark.parametrize(
    ("mass", "met", "verdict", "words"),
    [
        ([0.5, 0.96, 0.99], [True, True, True], "k = 2", "k = 2 is the smallest that keeps 95 % of the attention"),
        ([0.5, 0.96, 0.99], [True, False, True], "k = 3", "k = 3 is the smallest"),
        ([0.5, 0.96, 0.99], [False, False, False], "none", "it meets the paper's conditions in 0 of 8 cases"),
        ([0.5, 0.96, 0.99], [True, False, False], "none", "from k = 1 on some k meets all"),
        (
            [0.5, 0.6, 0.7],
            [True, True, True],
            "nothing conclusive",
            r"no k up to 3 keeps 95 % .* \(k = 3 keeps 70%\)",
        ),
    ],
)
def test_the_recommendation(made_up, mass, met, verdict, words):
    found = recommendation(made_sweep(made_up, mass, met), "m")
    assert found.verdict == verdict
    assert found.k == (int(verdict[-1]) if verdict.startswith("k") else None)
    assert re.search(words, found.words)


def test_the_recommendation_tells_what_a_rerun_found(made_up):
    sweep = made_sweep(made_up, [0.5, 0.96, 0.99], [True] * 3, "topk", [0.98, 0.7, 0.975, 0.5])
    words = recommendation(sweep, "m").words
    assert words.startswith("Trained with k = 5")
    assert "97.5% with k = 2; as accurate, within the error of these samples, at k = 2." in words


def test_a_fixed_mask_gets_no_recommendation(made_up):
    found = Findings(made_up(("m", np.ones(8), {"attention": "banded", "k": 5})))
    assert recommendation(found, "m").verdict == "not applicable"
    (result,) = sweep_summary(found)["results"]
    assert result["words"] == "Not applicable: the mask of banded attention ranks no scores."
