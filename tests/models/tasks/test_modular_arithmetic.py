from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

from semdiag_models.tasks import TASKS

TASK = TASKS["modular-arithmetic"]
OPERATIONS = (lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b)


def sample(n, length, seed=0):
    return TASK.sample(n, length, torch.Generator().manual_seed(seed))


@cache
def law_given_root(length):
    """Exact law of the value for each root operator, shape (3, 5)."""
    law = np.zeros((3, 5))
    for a in range(1, length - 3):
        joint = np.outer(law_of_value(a), law_of_value(length - 3 - a)) / (length - 4)
        for k, operation in enumerate(OPERATIONS):
            for (left, right), p in np.ndenumerate(joint):
                law[k, operation(left, right) % 5] += p
    return law


@cache
def law_of_value(length):
    return np.full(5, 0.2) if length <= 4 else law_given_root(length).mean(0)


def test_the_exact_law_of_the_label_is_that_of_the_specification():
    assert law_of_value(40) == pytest.approx([0.29159, 0.17710, 0.17710, 0.17710, 0.17710], abs=6e-6)
    assert TASK.majority == pytest.approx(law_of_value(40)[0], abs=6e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13, 40])
def test_labels_have_their_exact_law(length, assert_law):
    labels = sample(40_000, length)[1]
    assert_law(Counter(labels.tolist()), dict(enumerate(law_of_value(length))))


def test_the_shortcut_answers_zero_whatever_the_root_operator_is(assert_share):
    assert (law_given_root(40).argmax(1) == 0).all()
    assert law_given_root(40)[2, 0] == pytest.approx(0.47, abs=0.02)
    assert_share((sample(50_000, 40)[1] == 0).double().mean(), TASK.shortcut[0], 50_000)


def test_tokens_have_the_shares_of_the_specification():
    shares = torch.nn.functional.one_hot(sample(50_000, 40)[0], 12).float().mean(1)[:, :11]  # of each string
    margin = 0.0005 + 4.5 * shares.std(0) / 50_000**0.5  # the digits that are not printed, and standard errors
    expected = [0.043] * 5 + [0.064, 0.145, 0.064, 0.256, 0.256, 0]
    assert ((shares.mean(0) - torch.tensor(expected)).abs() <= margin).all()


def test_samples_have_the_digits_and_the_depth_of_the_specification():
    tokens, _ = sample(20_000, 40)
    digits = (tokens < 5).sum(1)
    depth = ((tokens == 8).long() - (tokens == 9).long()).cumsum(1).amax(1)
    assert (digits.min(), digits.max()) == (7, 10)
    assert depth.min() == 4
    assert 8 <= depth.max() <= 10  # 9 is a case in 20 000
    assert depth.double().mean() == pytest.approx(5.2, abs=0.06)
