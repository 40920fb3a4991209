"""A k-sweep looks on during the clean pass of its command: how often the model runs, and equal numbers."""

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from measurements_by_hand import k_sweep_tables
from torch import nn

import semdiag
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.k_sweep import top_scores
from semdiag.questions.k_sweep.measure import K_SWEEP_TABLE, KSweepPlan
from semdiag_files import InputError

LETTERS, SAMPLES = 7, 9
PLAN = KSweepPlan(rerun=True, ks=(2, 4), kinds=("topk", "random"))
ALONE, AGAIN = [1, 1], [SAMPLES] * 4  # a sample as it is and with other tokens at its end; masks


class Causal(nn.Module):
    """One block of causal attention, to the logits of the next token; counts the samples of every call."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.tokens, self.qkv = nn.Embedding(LETTERS, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, LETTERS)

    def forward(self, ids):
        self.seen.append(len(ids))
        x = self.tokens(ids)
        q, k, v = (3 * part for part in self.qkv(x)[:, None].chunk(3, -1))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


@pytest.fixture
def ids():
    return torch.randint(LETTERS, (SAMPLES, 10), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Causal().double().eval()


def surveyed(model, ids, plan=PLAN, **how):
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=ids)
    return survey([loaded], Conditions(plans=(plan,), dtype="float64", **how))


@pytest.mark.slow
def test_two_kinds_with_two_k_take_six_forwards_and_the_test_for_causality(model, ids):
    semdiag.k_sweep(model, ids, plan=PLAN)
    assert model.seen == [SAMPLES, SAMPLES, *ALONE, *AGAIN]
    model.seen.clear()
    surveyed(model, ids)  # masks first, once the longest text has been looked at
    assert model.seen == [1, SAMPLES, *ALONE, *AGAIN, SAMPLES]


def test_without_a_rerun_the_clean_pass_is_enough(model, ids):
    semdiag.k_sweep(model, ids)
    assert model.seen == [SAMPLES]


def test_it_is_over_all_samples_whatever_other_probes_take(model, ids):
    surveyed(model, ids, KSweepPlan(rerun=False), probe_samples=3)
    assert model.seen == [SAMPLES]


def test_a_model_of_two_precisions_is_swept_as_it_is_run_again(model, ids):
    """The sweep is of a copy in the first one, the clean pass of the model as it is."""
    model.register_buffer("other", torch.zeros(1))
    model.seen = Shared()
    semdiag.k_sweep(model, ids)
    assert model.seen == [SAMPLES, SAMPLES]


class Shared(list):
    """One list for a model and its copies."""

    def __deepcopy__(self, memo):
        return self


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"queries": 4, "seed": 3}, {"min_keys": 4}])
def test_the_numbers_are_those_of_a_pass_of_its_own(how, model, ids):
    found = surveyed(model, ids, batch_size=4, **how)
    loaded = LoadedModel("own:model", "", model, "factory", "unknown")
    own = k_sweep_tables(loaded, ids, None, PLAN, batch_size=4, dtype=torch.float64, **how)
    for name, table in own.items():
        pd.testing.assert_frame_equal(getattr(found, name), table, check_exact=True)


@pytest.mark.slow
def test_a_model_from_elsewhere_has_few_k_unless_the_largest_is_named(model):
    """Every one up to 8, every fourth, those that are run, and K: the table's cost grows with their number."""
    ids = torch.randint(LETTERS, (SAMPLES, 24), generator=torch.Generator().manual_seed(1))
    few, every = (semdiag.k_sweep(model, ids, ks=(10,), rerun=True, max_k=k).sweep for k in (None, 23))
    assert sorted({*few["k"]}) == [*range(9), 10, 12, 16, 20, 23]
    assert sorted({*every["k"]}) == [*range(24)]
    same = every[every["k"].isin(few["k"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(few, same, check_exact=True)


@pytest.mark.slow
def test_an_encoder_looks_on_too_and_its_numbers_stay(tiny_models):
    found = survey([tiny_models[0]], Conditions(samples=SAMPLES, plans=(PLAN,)))
    tokens, labels, _ = tiny_models[0].default_inputs(SAMPLES, 0)
    own = k_sweep_tables(tiny_models[0], tokens, labels, PLAN, dtype=torch.float64)
    assert "stream_change" in set(own["sweep"]["quantity"])
    for name, table in own.items():
        pd.testing.assert_frame_equal(getattr(found, name), table, check_exact=True)


def test_scores_that_are_not_finite_are_told_and_nothing_is_swept(model, ids):
    with torch.no_grad():
        model.qkv.weight[0, 0] = torch.nan
    found = surveyed(model, ids)
    assert found[K_SWEEP_TABLE].empty
    assert any("its attention scores are not finite" in text for text in found.remarks["text"])
    assert model.seen == [1, SAMPLES]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [9, 2])
def test_too_many_queries_are_thinned_by_chance_and_nothing_is_refused(model, batch_size, monkeypatch):
    """Counts, means and extremes are of all queries; percentiles of the drawn ones, whatever the batches."""
    ids = torch.randint(LETTERS, (60, 40), generator=torch.Generator().manual_seed(1))
    whole = semdiag.k_sweep(model, ids, batch_size=batch_size, max_k=30)
    monkeypatch.setattr(top_scores, "_MOST_NUMBERS", 60_000)
    found = semdiag.k_sweep(model, ids, batch_size=batch_size, max_k=30)
    (said,) = [text for text in found.remarks["text"] if "drawn by chance" in text]
    assert said.startswith("percentiles of the sweep by k are those of one in 4 queries and one in 2 keys, drawn")
    exact = ["layer", "head", "k", "quantity", "queries", "p0", "p100", "undefined", "not_positive"]
    pd.testing.assert_frame_equal(found.sweep[exact], whole.sweep[exact], check_exact=True)
    pd.testing.assert_series_equal(found.sweep["mean"], whole.sweep["mean"], rtol=1e-12)
    some, every = (x.sweep.set_index(["layer", "head", "quantity", "k"]) for x in (found, whole))
    # Of some 600 of 2,400 queries no rank is off by more than 6.7% (99%): here by 15% and 25%.
    for name in ("weight_kept", "ratio", "load", "dispersion"):
        drawn, whole = some.loc[-1, -1, name, 5], every.loc[-1, -1, name, 5]
        assert whole["p10"] <= drawn["p25"] <= whole["p50"]
        assert whole["p25"] <= drawn["p50"] <= whole["p75"]
    other = semdiag.k_sweep(model, ids, batch_size=7, max_k=30)
    pd.testing.assert_frame_equal(found.sweep, other.sweep)


def test_queries_are_drawn_from_python_too(model, ids):
    found = semdiag.k_sweep(model, ids, queries=4, seed=3)
    assert found.models["share"].tolist() == [0.4]
    assert len(found.sweep_estimates) > 0
    with pytest.raises(InputError, match="needs every query"):
        semdiag.mask_stability(model, ids, queries=4)
