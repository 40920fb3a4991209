"""The contract of an answer, and the ways in which it is shown: terminal, JSON, CSV, and what a page needs."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    from rich.console import Console

MOST_LINES = 23  # of tables that go on for long, without ``--all``: 30 with what is printed around them
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
class Claim:
    """A statement of an answer: page, terminal and JSON choose it by question, subject and ``id``."""

    id: str  # what it is about, like ``verdict``: one among the claims of a question about a subject
    sentence: str  # as a reader sees it
    subject: str = ""  # the model or the pair that it is about; empty: all that were measured
    value: float | None = None  # its main number
    unit: str = ""  # of the number
    interval: tuple[float, float] | None = None  # of 95%, around the number
    verdict: str | None = None  # in a word: an :class:`Outcome` or a verdict; None: it judges nothing

    @property
    def key(self) -> tuple[str, str]:
        """Return subject and id, which no other claim of a question has."""
        return self.subject, self.id


def numbered_claims(id: str, sentences: Iterable[str], subject: str = "") -> list[Claim]:
    """Make claims of sentences of one kind: ``id``, ``id-2`` and so on."""
    return [
        Claim(id if number == 1 else f"{id}-{number}", sentence, subject)
        for number, sentence in enumerate(sentences, start=1)
    ]


def sentences_of(claims: "Iterable[Claim | NumberTable]") -> list[str]:
    """Return the sentences of claims, without tables."""
    return [claim.sentence for claim in claims if isinstance(claim, Claim)]


@dataclass(frozen=True)
class Glance:
    """An answer at a glance: its tile on the page."""

    answer: Outcome  # in a word
    number: str  # with its denominator, like ``3 of 3 pairs``; empty if there is none
    words: str  # what the number counts
    # whether the answer is about a claim of the paper, and so says nothing good or bad about a model
    of_paper: bool = False
    claim_id: str = ""  # of the claim in the headline that says the same; empty if none does

    @property
    def sentence(self) -> str:
        """Return the number and what it counts."""
        return f"{self.number} {self.words}."

    @property
    def claim(self) -> Claim:
        """Return the claim that says the same, where the tile itself is it."""
        return Claim(self.claim_id, self.sentence, verdict=self.answer)


Part = str | Claim | NumberTable


@dataclass(frozen=True, eq=False)
class Collapsible:
    """Lines and tables on the terminal, of which ``--all`` shows the expanded ones."""

    collapsed: Sequence[Part]
    expanded: Sequence[Part]


Shown = Part | Collapsible


@dataclass(frozen=True, eq=False)
class Answer:
    """What measurements say to a question. No claim stands twice: details are what the headline does not say."""

    glance: Glance | None = None  # the verdict, as a tile of the page
    headline: Sequence[Claim] = ()  # of the first screen
    details: Sequence[Claim | NumberTable] | None = None  # by model and pair; None: none are made
    findings: Sequence[Finding] | None = None  # the claims that it judges, with verdicts; None: it judges none
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # by file name without suffix, as CSV
    tables_alone: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # instead, on a page of its own
    results: Mapping[str, Summary] = field(default_factory=dict)  # what JSON says of each model, beside its facts
    more: Mapping[str, Any] = field(default_factory=dict)  # what else JSON says
    shown: Sequence[Shown] = ()  # lines and tables on the terminal
    most_lines: int | None = None  # of these without ``--all``; None: all
    opening: Sequence[Claim] | None = None  # what comes before these; None: headline, or else details


def show(answer: Answer, every: bool = False) -> None:
    """Print the tables and lines of an answer, those about errors of semdiag in red; ``every``: expanded."""
    console = wide_console()
    if every or answer.most_lines is None:
        _print_shown(console, answer.shown, every)
        return
    with console.capture() as captured:
        _print_shown(console, answer.shown, every)
    lines = captured.get().splitlines(keepends=True)
    left_out = len(lines) - answer.most_lines
    console.file.write("".join(lines[: answer.most_lines]))
    if left_out > 0:
        console.file.write(f"{counted(left_out, 'more line')}: --all shows them.\n")


def _print_shown(console: "Console", shown: Sequence[Shown], every: bool) -> None:
    for part in shown:
        if not isinstance(part, Collapsible):
            _print_part(console, part)
            continue
        for inner in part.expanded if every else part.collapsed:
            _print_part(console, inner)


def _print_part(console: "Console", part: Part) -> None:
    if isinstance(part, NumberTable):
        console.print(part)
        return
    line = part.sentence if isinstance(part, Claim) else part
    style = "red" if "error of semdiag" in line.lower() else None
    console.print(line, soft_wrap=not console.is_terminal, style=style)


def opening_of(answers: Sequence[Answer]) -> list[str]:
    """Return the sentences with which the terminal begins."""
    if any(answer.opening is not None for answer in answers):
        return [claim.sentence for answer in answers for claim in answer.opening or ()]
    headlines = [claim for answer in answers for claim in answer.headline]
    details = [claim for answer in answers for claim in answer.details or ()]
    return sentences_of(headlines or details)[:MOST]


def as_json(name: str, findings: Findings, answer: Answer) -> Summary:
    """Return the object that ``--json`` prints."""
    models = {row["model"]: row for row in findings.measurements.models.to_dict("records")}
    results = [
        {fact: models[model][fact] for fact in MODEL_FACTS} | result for model, result in answer.results.items()
    ]
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


def sampled_word(findings: Findings) -> str:
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
            if value:
                yield _COUNTED[name].format(int(value))
        elif name not in (*_COUNTS, *_GAPS):
            yield f"{name} = {number(value, infinite=UNKNOWN)}"


def verdict_line(finding: Finding) -> str:
    """Return a claim with its verdict; for a claim about many rows, how many of how many exceed the bound."""
    claim = finding.claim
    if finding.form:
        claim += f" [{finding.form}]"
    if finding.where != "all":
        claim += f", {finding.where}"
    if finding.numbers.get("violated") and finding.form != "paper":
        claim = f"ERROR OF SEMDIAG: {claim}"
    line = f"{claim}: {_count_words(finding) or _ANSWERS[finding.verdict]}"
    if numbers := ", ".join(_number_words(finding.numbers)):
        line += f" ({numbers})"
    return f"{line}; {finding.note}" if finding.note else line


def _count_words(finding: Finding) -> str:
    """Return how many rows exceed a bound; empty for a claim that is about no rows."""
    holding, exceeding, vacuous, unmet = (int(finding.numbers.get(name, 0)) for name in _COUNTS)
    rows = holding + exceeding + vacuous
    if not rows:
        return ""
    words = f"{exceeding:,} of {rows:,} exceed the bound"
    if exceeding and finding.form == "paper":
        words += ", which contradicts the paper"
    if vacuous:
        words += f"; for {vacuous:,} the bound is too loose to test"
    if unmet:
        words += f"; {unmet:,} more do not meet its assumptions"
    return words


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
