"""The one table of attention kinds: what each keeps, and that everything that names kinds reads it."""

import dataclasses

import pytest
import torch

from semdiag_models import ATTENTIONS, AttentionKind, InputError
from semdiag_models.attention.selection import (
    DRAWN,
    LOCAL,
    first_centroids,
    hash_directions,
    random_priorities,
    select_keys,
)

# dense, input_dependent, has_bounds, ranks_scores, local, drawn
PROPERTIES = {
    "full": (True, False, True, True, False, False),
    "banded": (False, False, True, False, True, False),
    "block": (False, False, True, False, True, False),
    "topk": (False, True, True, True, False, False),
    "bottomk": (False, True, False, False, False, False),
    "random": (False, False, True, False, False, True),
    "redrawn": (False, False, False, False, False, False),
    "lsh": (False, True, False, False, False, True),
    "routing": (False, True, False, False, False, True),
}


@pytest.fixture
def model_of(tiny_model):
    """Call with a kind: an encoder's configuration; k is 3 unless the kind is dense."""
    return lambda kind, **fields: tiny_model(attention=kind, k=None if ATTENTIONS[kind].dense else 3, **fields)


def test_every_kind_is_known_here():
    assert list(ATTENTIONS) == list(PROPERTIES)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_properties(name):
    kind = ATTENTIONS[name]
    found = (kind.dense, kind.input_dependent, kind.has_bounds, kind.ranks_scores, kind.local, kind.drawn)
    assert found == PROPERTIES[name]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_kind_is_said_in_words_and_cannot_be_changed(name):
    kind = ATTENTIONS[name]
    assert kind.meaning
    assert "\n" not in kind.meaning
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind.keeps = "all"


def test_a_set_is_local_only_if_it_is_fixed_and_not_drawn():
    for kind in ATTENTIONS.values():
        assert not kind.local or (kind.keeps == "fixed" and not kind.drawn)


def test_the_derived_names():
    assert LOCAL == ("banded", "block")
    assert DRAWN == ("random", "lsh", "routing")


def test_a_new_kind_follows_from_what_it_keeps():
    assert AttentionKind("all of them", "all").dense
    assert AttentionKind("the largest", "largest").ranks_scores
    assert not AttentionKind("the smallest", "smallest").has_bounds
    assert not AttentionKind("some", "fixed").input_dependent


@pytest.mark.parametrize("name", ATTENTIONS)
def test_only_dense_attention_takes_no_k(name, tiny_model):
    right, wrong = (None, 3) if ATTENTIONS[name].dense else (3, None)
    assert tiny_model(attention=name, k=right).attention == name
    with pytest.raises(InputError, match="takes no k" if right is None else "needs k"):
        tiny_model(attention=name, k=wrong)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_global_tokens_go_with_local_kinds_alone(name, model_of):
    if ATTENTIONS[name].local:
        assert model_of(name, global_tokens=1).global_tokens == 1
        return
    with pytest.raises(InputError, match="Global tokens go with banded and block attention only"):
        model_of(name, global_tokens=1)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_seed_of_the_selection_goes_with_drawn_kinds_alone(name, model_of):
    if ATTENTIONS[name].drawn:
        assert model_of(name, selection_seed=1).selection_seed == 1
        return
    with pytest.raises(InputError, match="Only random, lsh and routing attention take a selection_seed"):
        model_of(name, selection_seed=1)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_kept_keys_follow_the_scores_exactly_where_it_says_so(name):
    """Scores turned round keep other keys if and only if the kind is input-dependent."""
    kind, k = ATTENTIONS[name], None if ATTENTIONS[name].dense else 3
    q, keys = torch.randn(2, 1, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    drawn = {
        "random": {"priorities": random_priorities(0, 1, 1, 8, q.device)[0]},
        "lsh": {"directions": hash_directions(0, (1, 1, 1, 3, 4), q.device, q.dtype)[0]},
        "routing": {"centroids": first_centroids(0, 0, (1, 3, 4))},
    }.get(name, {})
    one, other = (select_keys(name, k, sign * q, keys, 1.0, None, **drawn) for sign in (1, -1))
    if kind.keeps == "redrawn":
        assert not torch.equal(one, other)
        assert one.shape == (1, 1, 8, 3)
    elif kind.dense:
        assert one is other is None
    else:
        assert torch.equal(one, other) != kind.input_dependent
        assert one.shape == (1, 1, 8, 3) or name == "routing"


@pytest.mark.parametrize("name", ["", "Full", "top-k", "causal", "masked", "sparse"])
def test_an_unknown_kind_is_refused_with_those_that_are_known(name, tiny_model):
    with pytest.raises(InputError, match="full") as refused:
        tiny_model(attention=name, k=3)
    assert "\n" not in str(refused.value)
