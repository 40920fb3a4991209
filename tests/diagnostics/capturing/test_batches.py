"""Batches of any shape: cut, counted, moved, called with, and their padding read."""

import pytest
import torch
from torch import nn

from semdiag.capturing.batches import call, moved, repeated, samples_of, split
from semdiag_files import InputError


class Named(nn.Module):
    """Returns its arguments."""

    def forward(self, tokens, attention_mask=None, flag=True):
        return tokens, attention_mask, flag


def test_a_model_is_called_as_the_batch_says():
    tokens, mask = torch.arange(6).view(2, 3), torch.ones(2, 3)
    assert call(Named(), tokens) == (tokens, None, True)
    assert call(Named(), {"tokens": tokens, "flag": False}) == (tokens, None, False)
    assert call(Named(), (tokens, mask)) == (tokens, mask, True)


def test_a_dictionary_may_be_one_argument():
    """As of sentence-transformers; it was refused, without a tensor."""
    features = {"tokens": torch.zeros(2, 3), "flag": True}
    (batch,) = split([(features, None)], 5)
    assert call(Named(), batch)[:2] == (features, None)
    assert samples_of(batch) == 2
    changed = moved(repeated(batch, 2), "cpu", torch.float64)[0]
    assert (changed["tokens"].shape, changed["tokens"].dtype, changed["flag"]) == ((4, 3), torch.float64, True)
    halves = split({"batch": features, "table": torch.zeros(4)}, 1)
    assert [(half["batch"]["tokens"].shape, len(half["table"])) for half in halves] == [((1, 3), 4)] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_tensors_and_dictionaries_are_cut_and_nothing_is_lost(size):
    whole = {"tokens": torch.arange(21).view(7, 3), "table": torch.arange(4), "flag": True}
    parts = split(whole, size)
    assert torch.equal(torch.cat([part["tokens"] for part in parts]), whole["tokens"])
    assert all(torch.equal(part["table"], whole["table"]) and part["flag"] is True for part in parts)
    assert [samples_of(part) for part in parts] == [min(size, 7 - i) for i in range(0, 7, size)]
    assert torch.equal(torch.cat(split(whole["tokens"], size)), whole["tokens"])


def test_what_is_cut_already_stays_as_it_is_but_for_empty_batches():
    given = [torch.zeros(3, 2), {"tokens": torch.zeros(0, 2)}, (torch.zeros(1, 2), None)]
    assert split(iter(given), 2) == [given[0], given[2]]


@pytest.mark.parametrize("wrong", [None, 3, "text", [torch.zeros(2, 2), "text"]])
def test_other_inputs_are_refused(wrong):
    with pytest.raises(InputError, match=r"^Inputs are a tensor, a dictionary of tensors"):
        split(wrong, 2)


def test_only_floating_point_tensors_change_their_type():
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64), "pixels": torch.zeros(2, 3), "flag": True}
    found = moved(batch, "cpu", torch.float64)
    assert (found["ids"].dtype, found["pixels"].dtype, found["flag"]) == (torch.int64, torch.float64, True)
    assert [t.dtype for t in moved([batch["ids"], batch["pixels"]], "cpu", torch.float64)] == [
        torch.int64,
        torch.float64,
    ]
