"""A function that builds a model and loads nothing, or a part: it is said which weights are random."""

import pytest
import torch
from torch import nn

from semdiag.capturing.loading import watched_weights


def layer():
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))


def test_what_one_call_missed_and_another_loaded_is_loaded():
    with watched_weights() as weights:
        model = layer()
        model.load_state_dict({"0.weight": torch.zeros(3, 2)}, strict=False)
        model[1].load_state_dict(nn.LayerNorm(3).state_dict())
    assert weights.not_loaded(model) == ["0.bias"]
    assert weights.described(model) == "1 of its 4 parameters were not loaded (0.bias)"


def test_the_watch_is_over_with_the_context_and_changes_nothing():
    original = nn.Module.load_state_dict
    with watched_weights() as weights:
        model = layer()
        found = model.load_state_dict(layer().state_dict(), assign=True)
        with pytest.raises(RuntimeError):
            model.load_state_dict({"x": torch.zeros(1)})
    assert nn.Module.load_state_dict is original
    assert (list(found.missing_keys), weights.described(model)) == ([], "")


def test_a_model_that_was_replaced_is_no_concern():
    with watched_weights() as weights:
        layer().load_state_dict({}, strict=False)
        model = layer()
    assert weights.described(model) == ""


def tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_are_loaded_once_for_both():
    with watched_weights() as weights:
        model = tied()
        model.load_state_dict({"0.weight": torch.zeros(5, 3)}, strict=False)
    assert weights.described(model) == ""


@pytest.mark.parametrize("write", [lambda p, x: p.copy_(x), lambda p, x: p.data.copy_(x)])
def test_what_is_copied_by_hand_is_loaded(write):
    with watched_weights() as weights, torch.no_grad():
        model = layer()
        model.load_state_dict({f"module.{name}": x for name, x in model.state_dict().items()}, strict=False)
        for parameter in model.parameters():
            write(parameter, torch.full_like(parameter, 0.5))
    assert weights.described(model) == ""


def test_buffers_hold_nothing_random():
    with watched_weights() as weights:
        model = nn.BatchNorm1d(3)
        model.load_state_dict(dict(model.named_parameters()), strict=False)
    assert weights.described(model) == ""
