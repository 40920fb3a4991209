"""Kinds of attention as the tables name them, those of external models among them."""

import pandas as pd
import pytest
import torch

from semdiag.capturing.attention_kinds import (
    APPROXIMATE,
    BOUNDED,
    CHANGING,
    DENSE,
    EXTERNAL_SOURCES,
    FIXED_MASKS,
    HEAVY_HITTERS,
    KINDS,
    SCORED,
    external,
    joint_kind,
    mask_kind,
)
from semdiag.measurement.calls.running import unnamed
from semdiag.measurement.probes.noise.mask_rows import SELECTIONS
from semdiag_models import ATTENTIONS, Encoder


def test_the_trainers_kinds_and_those_of_external_masks():
    assert list(KINDS) == [*ATTENTIONS, "causal", "masked"]
    assert all(KINDS[name] is kind for name, kind in ATTENTIONS.items())


@pytest.mark.parametrize("name", ["causal", "masked"])
def test_a_mask_of_an_external_model_drops_no_key_that_it_allows(name):
    kind = KINDS[name]
    assert (kind.dense, kind.input_dependent, kind.has_bounds, kind.ranks_scores) == (True, False, True, True)
    assert kind.meaning
    assert (kind.local, kind.drawn) == (False, False)


def test_the_derived_names():
    assert DENSE == ("full", "causal", "masked")
    assert FIXED_MASKS == ("full", "banded", "block", "random", "causal", "masked")
    assert HEAVY_HITTERS == ("topk",)
    assert CHANGING == ("topk", "bottomk", "lsh", "routing")
    assert APPROXIMATE == ("lsh", "routing")
    assert BOUNDED == ("full", "banded", "block", "topk", "random", "causal", "masked")
    assert SCORED == ("full", "topk", "causal", "masked")


def test_every_mask_is_fixed_or_changes_or_is_redrawn_and_none_is_both():
    assert sorted((*FIXED_MASKS, *CHANGING, "redrawn")) == sorted(KINDS)


def test_a_bound_is_known_of_fixed_masks_and_heavy_hitters():
    assert sorted(BOUNDED) == sorted(FIXED_MASKS + HEAVY_HITTERS)
    assert set(HEAVY_HITTERS) < set(CHANGING)


def test_scores_are_ranked_where_all_keys_are_kept_or_the_largest():
    assert sorted(SCORED) == sorted(DENSE + HEAVY_HITTERS)
    assert set(DENSE) < set(FIXED_MASKS)


def test_a_mask_can_be_put_under_noise_unless_it_ignores_the_scores():
    assert list(SELECTIONS) == list(KINDS)
    for name, selection in SELECTIONS.items():
        assert (selection is None) == (name in (*FIXED_MASKS, "redrawn") and name not in DENSE)
        if selection is not None:
            assert selection.own == (name in CHANGING)


@pytest.mark.parametrize("source", ["semdiag", "paper code", "python", *EXTERNAL_SOURCES])
def test_a_model_is_external_by_its_source(source):
    models = pd.DataFrame({"model": ["a", "b"], "source": ["semdiag", source]})
    assert external(models).tolist() == [False, source in EXTERNAL_SOURCES]


def test_the_source_of_a_module_says_whether_it_is_external(tiny_config):
    with torch.random.fork_rng():
        modules = Encoder(tiny_config()), torch.nn.TransformerEncoderLayer(8, 2)
    for module in modules:
        loaded = unnamed(module)
        assert external(pd.DataFrame({"source": [loaded.source]})).item() == loaded.external


def keys_of(*rows):
    """(B, 1, L) numbers of keys."""
    return torch.tensor(rows)[:, None]


@pytest.mark.parametrize(
    ("keys", "queries", "kind"),
    [
        (keys_of([3, 3, 3]), None, "full"),
        (keys_of([3, 3, 3], [2, 2, 2]), None, "full"),
        (keys_of([4]), None, "full"),
        (keys_of([1, 2, 3]), None, "causal"),
        (keys_of([5, 6, 7]), None, "causal"),  # with a prefix in a cache
        (keys_of([1, 2, 2]), None, "masked"),
        (keys_of([3, 2, 1]), None, "masked"),
        (keys_of([1, 2, 3], [3, 3, 3]), None, "masked"),
        (keys_of([2, 2, 0]), [[True, True, False]], "full"),
        (keys_of([0, 1, 2]), [[False, True, True]], "causal"),
        (keys_of([1, 2, 9]), [[True, True, False]], "causal"),
        (keys_of([1, 2, 3]), [[True, False, True]], "full"),  # no two queries stand beside each other
    ],
)
def test_masks_are_told_by_how_many_keys_queries_have(keys, queries, kind):
    assert mask_kind(keys, None if queries is None else torch.tensor(queries)) == kind


def test_one_head_that_differs_is_enough():
    both = torch.tensor([[[1, 2, 3], [3, 3, 3]]])
    assert mask_kind(both, None) == "masked"
    assert mask_kind(both[:, :1], None) == "causal"


def test_one_word_for_layers_that_differ():
    assert joint_kind({"causal"}) == "causal"
    assert joint_kind({"causal", "full"}) == "masked"
    assert joint_kind({"causal", "masked"}) == "masked"
