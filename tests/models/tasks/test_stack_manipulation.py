from collections import Counter

import numpy as np
import pytest
import torch

from semdiag_models.tasks import POP, PUSH_0, PUSH_1, TASKS

TASK = TASKS["stack-manipulation"]


def sample(n, length, seed=0):
    return TASK.sample(n, length, torch.Generator().manual_seed(seed))


def law_of_final_height(length):
    """Exact, by stepping the law of the height through the actions for each number of bits."""
    total = np.zeros(length + 1)
    for bits in range(1, length):
        height = np.eye(length + 1)[bits]
        for _ in range(length - bits):
            pushed = np.append(0, height[:-1])
            popped = np.append(height[1:], 0)
            popped[0] += height[0]
            height = (2 * pushed + popped) / 3
        total += height / (length - 1)
    return total


def test_the_law_of_the_height_is_that_of_the_specification():
    law = law_of_final_height(40)
    assert law[0] == pytest.approx(0.000271, abs=5e-7)
    mean = law @ np.arange(41)
    deviation = (law @ (np.arange(41) - mean) ** 2) ** 0.5
    assert abs(mean - 26.6) < 4.5 * deviation / 20_000**0.5  # measured on 20 000 strings of the source
    assert (1 - law[0]) / 2 == pytest.approx(TASK.majority, abs=5e-7)


@pytest.mark.parametrize("length", [2, 3, 6, 10])
def test_labels_have_their_exact_law_at_short_lengths(length, assert_law):
    empty = law_of_final_height(length)[0]
    labels = sample(50_000, length)[1]
    assert_law(Counter(labels.tolist()), {0: (1 - empty) / 2, 1: (1 - empty) / 2, 2: empty})


@pytest.mark.slow
def test_an_empty_stack_is_as_rare_as_it_should_be_at_length_forty(assert_share):
    assert_share((sample(400_000, 40)[1] == 2).double().mean(), law_of_final_height(40)[0], 400_000)


def test_final_heights_have_their_law():
    tokens, _ = sample(20_000, 40)
    height = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.T:
        height = (height + torch.where(column == POP, -1, 1)).clamp_min(0)
    law = law_of_final_height(40)
    mean = law @ np.arange(41)
    deviation = (law @ (np.arange(41) - mean) ** 2 / len(tokens)) ** 0.5
    assert abs(height.double().mean() - mean) < 4.5 * deviation


def test_the_number_of_bits_is_uniform(assert_law):
    bits = (sample(39_000, 40)[0] < POP).sum(1)
    assert_law(Counter(bits.tolist()), dict.fromkeys(range(1, 40), 1 / 39))


def test_bits_come_first_and_actions_are_uniform(assert_law):
    tokens, _ = sample(20_000, 6)
    acting = tokens >= POP
    assert (acting[:, 1:] >= acting[:, :-1]).all()
    actions = Counter(tokens[acting].tolist())
    assert_law(actions, dict.fromkeys((POP, PUSH_0, PUSH_1), 1 / 3))
    assert_law(Counter(tokens[~acting].tolist()), {0: 0.5, 1: 0.5})


def test_the_last_token_alone_reaches_the_shortcut(assert_share):
    tokens, labels = sample(50_000, 40)
    guess = torch.where(tokens[:, -1] == POP, 0, tokens[:, -1] - PUSH_0)
    assert_share((guess == labels).double().mean(), TASK.shortcut[0], 50_000)


def test_a_single_bit_is_its_own_top():
    tokens, labels = sample(100, 1)
    assert torch.equal(tokens[:, 0], labels)
    assert set(labels.tolist()) == {0, 1}
