from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from semdiag_models.tasks import TASKS

TASK = TASKS["cycle-navigation"]


def test_all_strings_are_equally_likely(assert_law):
    tokens, _ = TASK.sample(27_000, 3, torch.Generator().manual_seed(0))
    assert_law(Counter(map(tuple, tokens.tolist())), dict.fromkeys(product(range(3), repeat=3), 1 / 27))


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_labels_have_the_law_of_the_walk(length, assert_law):
    place = np.eye(5)[0]
    for _ in range(length):
        place = (np.roll(place, -1) + place + np.roll(place, 1)) / 3
    labels = TASK.sample(30_000, length, torch.Generator().manual_seed(1))[1]
    assert_law(Counter(labels.tolist()), {i: p for i, p in enumerate(place) if p > 0})


def test_no_single_token_tells_the_label(assert_share):
    tokens, labels = TASK.sample(50_000, 40, torch.Generator().manual_seed(2))
    for i in (0, 39):
        for symbol in range(3):
            labels_there = labels[tokens[:, i] == symbol]
            for label in range(5):
                assert_share((labels_there == label).double().mean(), TASK.shortcut[0], len(labels_there))
