"""Whatever is cut into strips: all tables are the same where each strip holds one row, sample or head."""

import importlib

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.mask_precision import PrecisionPlan
from semdiag.questions.mask_stability import NoisePlan
from semdiag.questions.overlap import OverlapPlan
from semdiag.questions.stability import SecantsPlan

STRIPS = {
    "capturing.kept_keys": "_AT_ONCE", "capturing.masked_attention": "_AT_ONCE",
    "capturing.provenance.score_history": "_AT_ONCE", "mathematics.row_statistics": "_STRIP",
    "mathematics.selections": "_HELD", "measuring.calls.counted_rows": "_STRIP", "measuring.outputs": "_AT_ONCE",
    "questions.k_sweep.budgets": "_AT_ONCE", "questions.mask_precision.measure": "_STRIP",
    "questions.mask_stability.mask_rows": "_STRIP", "questions.overlap.measure": "_ENTRIES",
    "questions.stability.gains": "_ENTRIES", "questions.stability.measure": "_SCORES",
}  # fmt: skip
NAMES = (
    "queries", "heads", "sweep", "rerun", "masks", "overlap", "rounded_masks", "secants", "gains",
)  # fmt: skip
PLANS = (
    KSweepPlan(rerun=True, ks=(2, 5), kinds=("topk", "topk-layer", "window", "random")),
    NoisePlan(draws=2, k=2),
    OverlapPlan(2),
    PrecisionPlan(("bfloat16",), 2),
    SecantsPlan(),
)


class Model(nn.Module):
    """A layer of fused attention with shared key heads, one by hand; a sample begins with padding."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
            self.places = nn.Embedding(9, 16)  # without them the keys of one token tie, and rounding decides
            self.qkv = nn.ModuleList([nn.Linear(16, 32), nn.Linear(16, 48)])

    def forward(self, input_ids, attention_mask):
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.places.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask[:, None, None].bool()
        mask = mask | torch.eye(length, dtype=torch.bool)
        q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in self.qkv[0](x).split([16, 8, 8], -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in self.qkv[1](x).chunk(3, -1))
        weights = (2 * q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1)
        return self.head(x + (weights @ v).transpose(1, 2).flatten(2))


def tables(plans=PLANS, positions=True):
    ids = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    batches = [{"input_ids": ids, "attention_mask": mask}]
    model = Model()
    if not positions:
        nn.init.zeros_(model.places.weight)
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=batches)
    return survey([loaded], Conditions(dtype="float64", plans=plans))


@pytest.mark.slow
def test_tables_do_not_depend_on_the_size_of_strips(monkeypatch):
    whole = tables()
    for module, name in STRIPS.items():
        monkeypatch.setattr(importlib.import_module(f"semdiag.{module}"), name, 1)
    cut = tables()
    for name in NAMES:
        expected, found = (_in_order(getattr(measured, name)) for measured in (whole, cut))
        assert len(expected), name
        if name == "gains":  # iterations begin elsewhere
            pd.testing.assert_frame_equal(
                found.drop(columns="settled"), expected.drop(columns="settled"), rtol=0.01
            )
        else:
            pd.testing.assert_frame_equal(found, expected, rtol=1e-9)


def test_keys_that_tie_but_for_rounding_are_not_separated(monkeypatch):
    """Which of them is kept is up to rounding; what separates them is not."""

    def scores_of_sweep():
        sweep = tables((KSweepPlan(),), positions=False).sweep
        quantities = ["dispersion", "separation", "weight_kept", "ln_sound", "ln_paper"]
        return _in_order(sweep[sweep["quantity"].isin(quantities)])

    expected = scores_of_sweep()
    separation = expected.query("quantity == 'separation' and layer == 0")
    assert (separation.query("not_positive > 0")["p0"] == 0).any()
    assert not separation["p0"].between(0, 1e-12, inclusive="neither").any()
    for module, name in STRIPS.items():
        monkeypatch.setattr(importlib.import_module(f"semdiag.{module}"), name, 1)
    pd.testing.assert_frame_equal(scores_of_sweep(), expected, rtol=1e-9)


def _in_order(table):
    places = [name for name in ("sample", "layer", "head", "query", "mask", "k", "quantity") if name in table]
    return table.sort_values(places, kind="stable").reset_index(drop=True)
