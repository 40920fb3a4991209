"""Samples of lengths that are drawn: which, with which labels, and again from the seed."""

from collections import Counter

import pytest
import torch
from scipy import stats

from semdiag_files import InputError
from semdiag_models.config import TrainingConfig
from semdiag_models.tasks import draw_data, find_task

TASK = find_task("even-pairs")


def drawn(task="even-pairs", **fields):
    config = TrainingConfig(**{"task": task, "length": 20, "epochs": 1, "least_length": 5, "seed": 3, **fields})
    return config, draw_data(config, 24, find_task(task).pad_id)


def lengths_of(split, pad):
    return (split.tokens != pad).sum(1)


@pytest.mark.parametrize("task", ["even-pairs", "missing-duplicate", "parity", "stack-manipulation"])
def test_every_sample_is_a_string_of_its_length_with_its_label_and_padding_behind(task):
    _, splits = drawn(task, train_samples=300, holdout_samples=200)
    found = find_task(task)
    for split, number in zip(splits, (300, 200), strict=True):
        assert split.tokens.shape == (number, 24)
        for tokens, label in zip(split.tokens.tolist(), split.labels.tolist(), strict=True):
            string = [token for token in tokens if token != found.pad_id]
            assert tokens == string + [found.pad_id] * (24 - len(string))
            assert task != "parity" or string.count(1) % 2 == label
            assert task != "even-pairs" or string[0] ^ string[-1] == label
            assert 5 - (task != "even-pairs") <= len(string) <= 20  # missing-duplicate pads odd lengths itself


def test_lengths_are_uniform():
    """A chi-squared test of 16 lengths at 1 in 10⁶, of a fixed seed."""
    _, (train, _) = drawn(train_samples=8000)
    counts = Counter(lengths_of(train, TASK.pad_id).tolist())
    assert set(counts) == set(range(5, 21))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-6


def test_they_are_the_same_again_and_every_epoch_has_its_own():
    config, (train, _) = drawn(train_samples=50, fresh_samples=True)
    assert torch.equal(draw_data(config, 24, TASK.pad_id)[0].tokens, train.tokens)
    later = draw_data(config, 24, TASK.pad_id, 1)[0]
    assert torch.equal(draw_data(config, 24, TASK.pad_id, 1)[0].tokens, later.tokens)
    assert not torch.equal(later.tokens, train.tokens)


def test_without_a_range_nothing_is_drawn_differently():
    config, (train, _) = drawn(least_length=None, train_samples=50)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(train.tokens[:, :20], TASK.draw(50, config.holdout_samples, 20, generator)[0][0])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"least_length": 20}, r"^A range of lengths rises, like 5:20\. Got 20:20\.$"),
        ({"least_length": 0}, r"Got 0:20\."),
        ({"task": "listops"}, r"^The task listops draws no lengths"),
    ],
)
def test_a_range_that_is_none_is_refused(fields, said):
    with pytest.raises(InputError, match=said):
        TrainingConfig(**{"task": "parity", "length": 20, "epochs": 1, "least_length": 5, **fields})
