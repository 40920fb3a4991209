"""How many lines of an answer the terminal shows."""

import pytest

from semdiag.presenting.answer import MOST_LINES, Answer, show
from semdiag.presenting.tables import Column, NumberTable
from semdiag.questions.registry import QUESTIONS


@pytest.fixture
def answer():
    table = NumberTable((Column("k"),), [{"k": k} for k in range(100, 150)])
    return Answer(shown=["first", table, "last"], most_lines=MOST_LINES)


def test_few_lines_are_printed_and_the_rest_is_counted(answer, capsys):
    show(answer)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MOST_LINES + 1
    assert lines[0] == "first"
    show(answer, every=True)
    every = capsys.readouterr().out.splitlines()
    assert every[-1] == "last"
    assert lines[:-1] == every[:MOST_LINES]
    assert lines[-1] == f"{len(every) - MOST_LINES} more lines: --all shows them."


@pytest.mark.parametrize("name", ["bounds", "stability", "lipschitz"])
def test_long_answers_have_the_option(name):
    assert "every" in QUESTIONS[name].takes
