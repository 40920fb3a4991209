"""The contract of an answer, and the ways in which it is shown: terminal, JSON, CSV, and what a page needs."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup

from semdiag.measuring.findings.estimates import all_by_name, percentile_table, sampled_models
from semdiag.measuring.findings.findings import MODEL_FACTS, Finding, Findings, Summary, Verdict, json_object
from semdiag.measuring.metrics import in_table
from semdiag.measuring.training_runs import RUNS
from semdiag.measuring.words import UNKNOWN, counted, number
from semdiag.presenting.drawing.panels import factors
from semdiag.presenting.drawing.style import Drawing
from semdiag.presenting.tables import NumberTable, wide_console
from semdiag_files import visible

if TYPE_CHECKING:
    from jinja2 import Environment

MOST = 5  # sentences with which the terminal begins, at most


class Outcome(StrEnum):
    """The kinds of answers to a question of a report."""

    HOLDS = "holds"
    DOES_NOT = "does not hold"
    OPEN = "inconclusive"
    PLAUSIBLE = "plausible"  # sparse attention suffices
    COSTS = "not without loss"  # sparse attention does not suffice
    CHANGES = "not without change"  # the same for outputs without a known loss
    MEASURED = "measured"  # the question has no yes or no


@dataclass(frozen=True)
class Glance:
    """An answer at a glance: its tile on the page."""

    answer: Outcome  # in a word
    number: str  # with its denominator, like ``3 of 3 pairs``; empty if there is none
    words: str  # what the number counts
    # whether the answer is about a claim of the paper, and so says nothing good or bad about a model
    claim: bool = False

    @property
    def sentence(self) -> str:
        """Return the number and what it counts."""
        return f"{self.number} {self.words}."


@dataclass(frozen=True, eq=False)
class Folded:
    """Lines and tables on the terminal that ``--all`` replaces."""

    short: Sequence[str | NumberTable]
    whole: Sequence[str | NumberTable]


@dataclass(frozen=True, eq=False)
class Answer:
    """What measurements say to a question."""

    glance: Glance | None = None  # the verdict, as a tile of the page
    headline: Sequence[str] = ()  # sentences of the first screen
    details: Sequence[str | NumberTable] | None = None  # by model and pair; None: none are made
    claims: Sequence[Finding] | None = None  # its claims with their verdicts; None: it judges none
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # by file name without suffix, as CSV
    tables_alone: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # instead, on a page of its own
    results: Mapping[str, Summary] = field(default_factory=dict)  # what JSON says of each model, beside its facts
    more: Mapping[str, Any] = field(default_factory=dict)  # what else JSON says
    shown: Sequence[str | NumberTable | Folded] = ()  # lines and tables on the terminal
    opening: Sequence[str] | None = None  # sentences that come before these; None: headline, or else details


def show(answer: Answer, every: bool = False) -> None:
    """Print the tables and lines of an answer, those about errors of semdiag in red; ``every``: unfolded."""
    console = wide_console()
    folds = [one if isinstance(one, Folded) else Folded([one], [one]) for one in answer.shown]
    for shown in (one for fold in folds for one in (fold.whole if every else fold.short)):
        if isinstance(shown, str):
            style = "red" if "error of semdiag" in shown.lower() else None
            console.print(shown, soft_wrap=not console.is_terminal, style=style)
        else:
            console.print(shown)


def opening_of(answers: Sequence[Answer]) -> list[str]:
    """Return the sentences with which the terminal begins."""
    if any(answer.opening is not None for answer in answers):
        return [sentence for answer in answers for sentence in answer.opening or ()]
    return first_sentences(answers, MOST)[:MOST]


def first_sentences(answers: Sequence[Answer], otherwise: int) -> list[str]:
    """Return the headlines of answers; where none has one, so many of their other sentences."""
    headlines = [sentence for answer in answers for sentence in answer.headline]
    details = [each for answer in answers for each in answer.details or () if isinstance(each, str)]
    return headlines or details[:otherwise]


def as_json(name: str, findings: Findings, answer: Answer) -> Summary:
    """Return the object that ``--json`` prints."""
    models = {row["model"]: row for row in findings.measurements.models.to_dict("records")}
    results = [{fact: models[model][fact] for fact in MODEL_FACTS} | own for model, own in answer.results.items()]
    return json_object(name, findings, **answer.more, results=results)


def title(findings: Findings, model: str) -> str:
    """Return a model's title above its tables: its path, its task if it has one, its attention."""
    row = next(row for row in findings.measurements.models.to_dict("records") if row["model"] == model)
    task = f"{row['task']} " if row["task"] and pd.notna(row["task"]) else ""
    return f"\n{model}  {task}{row['attention']}"


@dataclass(frozen=True)
class Heading:
    """A heading of a question's part of the page."""

    anchor: str  # its identifier in the page
    title: str  # a question
    figures: tuple[Drawing, ...]  # that answer it
    caveats: tuple[str, ...]  # what the answer does not cover


def heading(anchor: str, title: str, figures: tuple[Drawing, ...], *caveats: str) -> tuple[Heading, ...]:
    """Return the headings of a question that has one."""
    return (Heading(anchor, title, figures, caveats),)


def measured_glance(findings: Findings, table: pd.DataFrame) -> Glance:
    """Return the glance of a question without a single number: how many models were measured."""
    models = counted(len(findings.measurements.models), "model")
    return Glance(Outcome.MEASURED, f"{table['model'].nunique()} of {models}", "measured")


def drawn_word(findings: Findings) -> str:
    """Return `` drawn`` if only some queries were measured, else nothing."""
    return " drawn" if sampled_models(findings) else ""


def top_words(findings: Findings) -> str:
    """Return ``top-5`` where all models that keep their largest scores keep as many of them, else ``top-k``."""
    models = findings.measurements.models
    ks = models[models["attention"] == "topk"]["k"].dropna().unique()
    return f"top-{int(ks[0])}" if len(ks) == 1 else "top-k"


_COUNTS = ("holds", "violated", "vacuous", "not_met")
_GAPS = ("smallest log10 gap", "largest log10 gap")
_COUNTED = {
    "promises no less than 2": "for {:,} it allows 2 or more, and weights cannot move further",
    "below the sound form": "for {:,} it lies below the sound form",
}
_ANSWERS = {
    Verdict.HOLDS: "holds",
    Verdict.VIOLATED: "does not hold",
    Verdict.VACUOUS: "is too loose to test: it holds for every row, whatever was measured",
    Verdict.NOT_MET: "does not apply, an assumption is not met",
    Verdict.NOTHING: "inconclusive",
}


def _number_words(numbers: Mapping[str, float]) -> Iterator[str]:
    ends = [numbers[name] for name in _GAPS if name in numbers]
    if len(ends) == 2:
        yield f"bounds are {factors(*ends)} times what was measured"
    for name, value in numbers.items():
        if name in _COUNTED:
            yield from [_COUNTED[name].format(int(value))] if value else []
        elif name not in (*_COUNTS, *_GAPS):
            yield f"{name} = {number(value, infinite=UNKNOWN)}"


def verdict_line(finding: Finding) -> str:
    """Return a claim with its verdict; for a claim about many rows, how many of how many exceed the bound."""
    numbers, form, where = finding.numbers, finding.form, finding.where
    claim = finding.claim + (f" [{form}]" if form else "") + ("" if where == "all" else f", {where}")
    exceeding, vacuous, unmet = (int(numbers.get(name, 0)) for name in ("violated", "vacuous", "not_met"))
    rows = int(numbers.get("holds", 0)) + exceeding + vacuous
    if rows:
        parts = [f"{exceeding:,} of {rows:,} exceed the bound"]
        parts += [f"for {vacuous:,} the bound is too loose to test"] if vacuous else []
        parts += [f"{unmet:,} more do not meet its assumptions"] if unmet else []
        parts[0] += ", which contradicts the paper" * bool(exceeding and form == "paper")
        claim = "ERROR OF SEMDIAG: " * bool(exceeding and form != "paper") + claim
    else:  # no claim about rows, or no rows
        parts = [_ANSWERS[finding.verdict]]
    others = ", ".join(_number_words(numbers))
    line = f"{claim}: {'; '.join(parts)}" + (f" ({others})" if others else "")
    return f"{line}; {finding.note}" if finding.note else line


FACTS = ["model", "task", "attention", "k", "seed", "snapshot", "epoch"]
_RUN_FACTS = ["model", "task", "attention", "seed"]
_VERDICT = ["subject", "claim", "form", "where", "verdict", "numbers", "note"]


def with_facts(findings: Findings, table: pd.DataFrame) -> pd.DataFrame:
    """Put the facts of each model in front of a table with the column ``model``."""
    return findings.measurements.models[FACTS].merge(table, on="model")


def with_run_facts(findings: Findings, table: pd.DataFrame) -> pd.DataFrame:
    """Put task, attention and seed of each run in front of a table with the column ``model``."""
    return findings.measurements[RUNS][_RUN_FACTS].merge(table, on="model")


def verdict_table(judged: Sequence[Finding]) -> pd.DataFrame:
    """Return findings as a table, their numbers as one text: ``name = value; …``."""
    rows = []
    for finding in judged:
        numbers = "; ".join(f"{name} = {value:.12g}" for name, value in finding.numbers.items())
        rows.append({**vars(finding), "verdict": finding.verdict.value, "numbers": numbers})
    return pd.DataFrame(rows, columns=_VERDICT)


def percentile_csv(findings: Findings, quantity: str) -> pd.DataFrame:
    """Return percentiles of a quantity per layer and head, and pooled, with the model's facts."""
    return with_facts(findings, all_by_name(findings(percentile_table, quantity)))


def percentile_csvs(findings: Findings, command: str) -> dict[str, pd.DataFrame]:
    """Return :func:`percentile_csv` of every metric that a command shows, by name."""
    shown = [metric for metric in (*in_table("queries"), *in_table("loads")) if metric.command == command]
    measured = [metric.name for metric in shown if metric.name in getattr(findings.measurements, metric.table)]
    return {name: percentile_csv(findings, name) for name in measured}


_LONGEST = 80  # characters of a name: file systems allow 255 bytes, and a character takes up to four


def file_safe(model: str) -> str:
    """Return a model's name as a valid file name: a run's folder, and its snapshot if it is not the last."""
    prefix, place = ("hf-", model[3:]) if model.startswith("hf:") else ("", model)
    path = Path(os.path.normpath(place))
    name = path.name
    if path.name == "last.pt" and path.parent.name:
        name = path.parent.name
    elif path.suffix == ".pt":
        name = "-".join(part for part in (path.parent.name, path.stem) if part)
    return re.sub(r"[^\w.-]+", "-", prefix + name)[:_LONGEST].strip("-.") or "model"


def page_style() -> str:
    """Return the style sheet with which all pages begin: light and dark colours, type, headings."""
    return files("semdiag.presenting").joinpath("page.css").read_text(encoding="utf-8").rstrip("\n")


def page_environment() -> "Environment":
    """Return jinja's settings for pages: every value is escaped, an unknown name is an error."""
    from jinja2 import Environment, StrictUndefined

    return Environment(
        autoescape=True, finalize=_shown, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _shown(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
