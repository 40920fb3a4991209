from collections import Counter

import pytest
import torch

from semdiag_models.tasks import TASKS

TASK = TASKS["missing-duplicate"]


def sample(n, length, seed=0):
    return TASK.sample(n, length, torch.Generator().manual_seed(seed))


def test_all_strings_of_length_six_are_equally_likely(assert_law):
    law = {}
    for bits in range(8):
        doubled = [int(b) for b in f"{bits:03b}"] * 2
        for hidden in range(6):
            law[*doubled[:hidden], 2, *doubled[hidden + 1 :]] = 1 / 48
    assert len(law) == 48
    assert_law(Counter(map(tuple, sample(20_000, 6)[0].tolist())), law)


def test_the_placeholder_is_uniform_over_both_copies(assert_law):
    hidden = (sample(40_000, 40)[0] == 2).nonzero()[:, 1]
    assert_law(Counter(hidden.tolist()), dict.fromkeys(range(40), 1 / 40))


def test_labels_are_fair(assert_share):
    assert_share(sample(40_000, 40)[1].double().mean(), 0.5, 40_000)


def test_an_odd_length_ends_in_one_pad(label_of):
    odd, labels = sample(500, 7)
    assert (odd[:, -1] == TASK.pad_id).all()
    assert (odd[:, :-1] != TASK.pad_id).all()
    assert [label_of(TASK, row) for row in odd.tolist()] == labels.tolist()


def test_the_label_is_the_parity_of_the_visible_ones():
    tokens, labels = sample(2000, 40)
    assert torch.equal((tokens == 1).sum(1) % 2, labels)


@pytest.mark.slow
def test_the_first_token_alone_reaches_the_shortcut(assert_share):
    tokens, labels = sample(400_000, 40)
    right = (tokens[:, 0] == labels).double() + 0.5 * (tokens[:, 0] == 2)
    assert_share(right.mean(), TASK.shortcut[0], 400_000)
    assert TASK.shortcut[0] == 0.5 + 1 / 80
