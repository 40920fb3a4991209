"""The best rule on few tokens: against laws that can be computed by hand."""

import pytest

from semdiag.measuring.reach import shortcut
from semdiag_models.tasks import TASKS

SLACK = 0.012  # three standard errors of 20,000 samples


@pytest.mark.parametrize(
    ("name", "length", "accuracy"),
    [
        ("parity", 20, 0.5),  # every proper part is independent of the label
        ("even-pairs", 20, 0.5),  # one token tells nothing, the two that tell all are the task itself
        ("missing-duplicate", 20, 0.5 + 1 / 20),  # two twins: one of them is the placeholder in 2 of 20 strings
        ("cycle-navigation", 20, 0.2),
        ("solve-equation", 40, 0.2),
        ("modular-arithmetic", 40, 0.29159),  # the commonest answer
    ],
)
def test_the_level_is_that_of_the_law(name, length, accuracy):
    assert shortcut(TASKS[name], length).accuracy == pytest.approx(accuracy, abs=SLACK)


def test_two_twins_of_missing_duplicate_stand_half_a_string_apart():
    first, second = shortcut(TASKS["missing-duplicate"], 20).positions
    assert second - first == 10


def test_two_tokens_tell_more_of_a_stack_than_the_last_alone():
    found = shortcut(TASKS["stack-manipulation"], 20)
    assert 19 in found.positions
    assert found.accuracy > 0.8333 + SLACK


def test_even_pairs_of_three_bits_keeps_only_rules_that_can_err():
    """With 3 bits the two ends decide; every other pair tells nothing."""
    found = shortcut(TASKS["even-pairs"], 3)
    assert found.positions == ()
    assert found.accuracy == pytest.approx(0.5, abs=SLACK)


@pytest.mark.slow
def test_long_inputs_are_searched_at_their_ends():
    found = shortcut(TASKS["stack-manipulation"], 100)
    assert 99 in found.positions
    assert found.accuracy > 0.9
