"""Kinds of attention as the tables name them, those of external models among them."""

import pandas as pd
import pytest
import torch

from semdiag.capturing.attention_call import (
    APPROXIMATE,
    BOUNDED,
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
from semdiag.measuring.calls.running import unnamed
from semdiag.questions.mask_stability.mask_rows import selection_of
from semdiag_models import ATTENTIONS, Encoder

CHANGING = tuple(name for name, kind in KINDS.items() if kind.input_dependent)


def test_the_trainers_kinds_and_those_of_external_masks():
    assert list(KINDS) == [*ATTENTIONS, "causal", "masked"]
    assert all(KINDS[name] is kind for name, kind in ATTENTIONS.items())


@pytest.mark.parametrize("name", ["causal", "masked"])
def test_a_mask_of_an_external_model_drops_no_key_that_it_allows(name):
    kind = KINDS[name]
    assert (kind.dense, kind.input_dependent) == (True, False)
    assert kind.meaning


GROUPS = {
    "dense": DENSE, "fixed": FIXED_MASKS, "heavy hitters": HEAVY_HITTERS, "changing": CHANGING,
    "approximate": APPROXIMATE, "bounded": BOUNDED, "scored": SCORED,
}  # fmt: skip
GROUPS_OF = {
    "all": {"dense", "fixed", "bounded", "scored"},
    "fixed": {"fixed", "bounded"},
    "redrawn": set(),
    "largest": {"heavy hitters", "changing", "bounded", "scored"},
    "smallest": {"changing"},
    **{keeps: {"changing", "approximate"} for keeps in ("hashed", "clustered", "indexed", "pooled")},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_in_the_groups_of_what_it_keeps(name):
    assert {group for group, names in GROUPS.items() if name in names} == GROUPS_OF[KINDS[name].keeps]


def test_every_mask_is_fixed_or_changes_or_is_redrawn_and_none_is_both():
    assert sorted((*FIXED_MASKS, *CHANGING, "redrawn")) == sorted(KINDS)


def test_a_bound_is_known_of_fixed_masks_and_heavy_hitters():
    assert sorted(BOUNDED) == sorted(FIXED_MASKS + HEAVY_HITTERS)
    assert set(HEAVY_HITTERS) < set(CHANGING)


def test_scores_are_ranked_where_all_keys_are_kept_or_the_largest():
    assert sorted(SCORED) == sorted(DENSE + HEAVY_HITTERS)
    assert set(DENSE) < set(FIXED_MASKS)


def test_a_mask_can_be_put_under_noise_unless_it_ignores_the_scores():
    for name in {*KINDS} - {*APPROXIMATE}:
        selection = selection_of(name)
        assert (selection is None) == (name in (*FIXED_MASKS, "redrawn") and name not in DENSE)
        if selection is not None:
            assert selection.by_model == (name in CHANGING)


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


def told(keys, *shown, queries=None):
    """The kind of (H, L) or (L,) numbers of keys per sample, if the first so many keys of each are no padding."""
    counts = torch.tensor(keys)
    counts = counts[:, None] if counts.ndim == 2 else counts
    reached = torch.arange(9) < torch.tensor(shown)[:, None]
    real = torch.ones_like(counts, dtype=torch.bool) if queries is None else torch.tensor(queries)[:, None]
    return mask_kind(counts, reached, real)


@pytest.mark.parametrize(
    ("keys", "shown", "queries", "kind"),
    [
        ([[3, 3, 3]], [3], None, "full"),
        ([[3, 3, 3], [2, 2, 2]], [3, 2], None, "full"),
        ([[3, 3, 3]], [5], None, "masked"),  # each its own three of five
        ([[5, 5, 5], [3, 3, 3]], [5, 5], None, "masked"),
        ([[4]], [4], None, "full"),
        ([[4]], [6], None, "masked"),
        ([[1, 2, 3]], [3], None, "causal"),
        ([[5, 6, 7]], [7], None, "causal"),  # with a prefix in a cache
        ([[1, 2, 2]], [3], None, "masked"),
        ([[3, 2, 1]], [3], None, "masked"),
        ([[1, 2, 3], [3, 3, 3]], [3, 3], None, "masked"),
        ([[2, 2, 0]], [2], [[True, True, False]], "full"),
        ([[0, 1, 2]], [2], [[False, True, True]], "causal"),
        ([[1, 2, 9]], [2], [[True, True, False]], "causal"),
        ([[1, 2, 3]], [3], [[True, False, True]], "masked"),  # no two queries stand beside each other
    ],
)
def test_masks_are_told_by_how_many_keys_queries_have(keys, shown, queries, kind):
    assert told(keys, *shown, queries=queries) == kind


def test_one_head_that_differs_is_enough():
    assert told([[[1, 2, 3], [3, 3, 3]]], 3) == "masked"
    assert told([[[1, 2, 3]]], 3) == "causal"


def test_a_key_that_one_head_reaches_is_no_padding_of_the_others():
    three, two, real = torch.ones(1, 3) > 0, torch.tensor([[True, True, False]]), torch.ones(1, 2, 3) > 0
    assert mask_kind(torch.tensor([[[3, 3, 3], [2, 2, 2]]]), three, real) == "masked"
    assert mask_kind(torch.tensor([[[2, 2, 2], [2, 2, 2]]]), two, real) == "full"


def test_one_word_for_layers_that_differ():
    assert joint_kind({"causal"}) == "causal"
    assert joint_kind({"causal", "full"}) == "masked"
    assert joint_kind({"causal", "masked"}) == "masked"
