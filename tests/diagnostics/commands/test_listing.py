"""``semdiag list``."""

import pytest

from semdiag.measuring.metrics import METRICS
from semdiag_models import ATTENTIONS, TASKS


@pytest.mark.parametrize(
    ("what", "shown", "hidden"),
    [
        ("tasks", TASKS, ("every query",)),
        ("attentions", ATTENTIONS, ("parity",)),
        ("metrics", METRICS, ("parity", "banded")),
    ],
)
def test_one_kind_of_thing_is_listed(run_semdiag, what, shown, hidden):
    outcome = run_semdiag("list", what)
    assert (outcome.code, outcome.err) == (0, "")
    assert all(name in outcome.out for name in shown)
    assert not any(name in outcome.out for name in hidden)


def test_tasks_say_what_local_masks_cannot_represent(run_semdiag):
    words = " ".join(run_semdiag("list", "tasks").out.split())
    assert "banded on parity, even-pairs, stack-manipulation," in words
    assert "block on parity, even-pairs, missing-duplicate," in words


def test_everything_is_listed_if_nothing_is_named(run_semdiag):
    outcome = run_semdiag("list")
    assert outcome.code == 0
    assert all(name in outcome.out for name in (*TASKS, *ATTENTIONS, *METRICS))


def test_an_unknown_list_is_refused_with_the_nearest(refusal):
    assert refusal("list", "taks") == (
        "Unknown list 'taks'. Did you mean 'tasks'? Known: tasks, attentions, metrics."
    )
