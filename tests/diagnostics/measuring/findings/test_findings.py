"""Findings: a question is answered once, and everybody gets the same answer."""

import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings, compared_pairs
from semdiag.questions import registry
from semdiag.questions.convergence.answer import run_statistics, speed_dispersion_table
from semdiag.questions.mask_stability.answer import mask_table
from semdiag.questions.separation.answer import separation_results


@pytest.fixture
def measured(made_up):
    return made_up(("full", [1, 2, 3, 4], {}), ("topk", [1, 1, 2, 2], {"attention": "topk", "k": 2}))


@pytest.fixture
def asked():
    """A question that counts how often it is worked out, under ``times``."""

    def question(findings):
        question.times += 1
        return findings.measurements.models["model"].tolist()

    question.times = 0
    return question


def test_an_answer_is_worked_out_once_and_shared(measured, asked):
    findings = Findings(measured)
    assert asked.times == 0  # nothing before it is asked for
    first = findings(asked)
    assert first == ["full", "topk"]
    assert findings(asked) is first
    assert asked.times == 1


def test_two_findings_share_nothing_not_even_of_the_same_measurements(measured, asked):
    one, other = Findings(measured), Findings(measured)
    assert one(asked) == other(asked)
    assert one(asked) is not other(asked)
    assert asked.times == 2


def test_findings_of_other_measurements_have_other_answers(measured, asked):
    fewer = Findings(measured.replace(models=measured.models[:1]))
    assert (Findings(measured)(asked), fewer(asked)) == (["full", "topk"], ["full"])


def test_a_question_may_ask_another_and_all_share_its_answer(measured, asked):
    def first(findings):
        return findings(asked)[0]

    def last(findings):
        return findings(asked)[-1]

    findings = Findings(measured)
    assert (findings(first), findings(last)) == ("full", "topk")
    assert asked.times == 1


def test_questions_of_the_same_name_are_told_apart(measured):
    findings = Findings(measured)
    assert [findings(lambda _, answer=answer: answer) for answer in (1, 2)] == [1, 2]


@pytest.mark.parametrize("answer", [None, 0, [], False])
def test_an_answer_that_is_nothing_is_an_answer(measured, answer):
    asked = []

    def question(findings):
        asked.append(findings)
        return answer

    findings = Findings(measured)
    assert findings(question) is findings(question) is answer
    assert len(asked) == 1


def test_a_question_that_cannot_be_answered_fails_every_time_it_is_asked(measured):
    tries = []

    def question(findings):
        tries.append(findings)
        raise ValueError("no answer")

    findings = Findings(measured)
    for _ in range(2):
        with pytest.raises(ValueError, match="no answer"):
            findings(question)
    assert len(tries) == 2


def test_a_question_with_arguments_is_answered_once_for_each():
    asked = []

    def question(findings, k, form="sound"):
        asked.append((k, form))
        return [k, form]

    findings = Findings(None)
    assert findings(question, 5) is findings(question, 5)
    assert findings(question, 5, form="paper") is findings(question, 5, form="paper")
    assert findings(question, 2) == [2, "sound"]
    assert asked == [(5, "sound"), (5, "paper"), (2, "sound")]


@pytest.mark.slow
def test_an_answer_is_what_the_function_returns(measured):
    findings = Findings(measured)
    assert findings(compared_pairs) == compared_pairs(findings)
    assert findings(separation_results) == separation_results(findings)
    pd.testing.assert_frame_equal(findings(mask_table), mask_table(findings))


@pytest.mark.slow
def test_what_every_command_prints_is_a_question(measured):
    findings = Findings(measured)
    for name in ("dispersion", "separation", "stability"):
        assert findings(registry.QUESTIONS[name].json)["schema"] == f"semdiag.{name}/2"
        assert findings(registry.QUESTIONS[name].json) is findings(registry.QUESTIONS[name].json)


def test_what_is_said_of_runs_is_said_of_one_table(tiny_runs):
    from semdiag.measuring.measure import Conditions
    from semdiag.questions.convergence.measure import ConvergencePlan, convergence_survey

    found = convergence_survey(
        [tiny_runs.full, tiny_runs.topk], Conditions(samples=5), plan=ConvergencePlan((("", 0.01),))
    )
    findings = Findings(found)
    statistics = findings(run_statistics)
    assert statistics["attention"].tolist() == ["full", "topk-3"]
    assert (statistics["arrived"] == 1).all()
    assert len(findings(speed_dispersion_table)) == 1
