"""What a section of a report says: its headings, tables and columns, and the page that holds them."""

import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from semdiag.capturing.attention_call import external
from semdiag.measuring.findings.estimates import all_by_name, drawn, percentile_table
from semdiag.measuring.findings.findings import Finding, Findings, Verdict
from semdiag.measuring.words import (
    UNKNOWN,
    Value,
    counted,
    interval,
    number,
    number_from_json,
    percent,
    whole_percent,
)
from semdiag.presenting.drawing.panels import factors
from semdiag.presenting.terminal import results_on_stderr, terminal
from semdiag_models.reading import visible

if TYPE_CHECKING:
    from jinja2 import Environment

NEVER = -1


def text(*values: Any) -> str:
    """Join the words of a name."""
    return " ".join(map(plain, values))


def plain(value: Any) -> str:
    """Return a layer, a head, a seed or a word unchanged."""
    return UNKNOWN if value is None else str(value)


def finite(value: Value) -> str:
    """Return a number; a dash for an infinity."""
    numeric = number_from_json(value)
    return number(numeric if math.isfinite(numeric) else None)


def _as(form: str) -> Callable[[Value], str]:
    """Return a function that formats numbers."""

    def format_value(value: Value) -> str:
        numeric = number_from_json(value)
        return UNKNOWN if math.isnan(numeric) else f"{numeric:{form}}"

    return format_value


count = _as(",.0f")
two_decimals, three_decimals, four_decimals = _as(".2f"), _as(".3f"), _as(".4f")
three_digits, four_digits = _as(".3g"), _as(".4g")
fine_percent, rough_percent = partial(percent, form=".2f"), partial(percent, form=".3g")


percent_interval = partial(interval, factor=100)


@dataclass(frozen=True)
class Column:
    """A column."""

    name: str  # entry in a row
    heading: str = ""  # above it; empty: the name
    form: Callable[..., str] = number  # turns the entries, or the row, into text
    drop: int = 0  # its turn to be dropped where the table is too wide: 1 goes first
    left: bool = False  # whether it is a name, aligned left and never dropped; a column of :func:`text` is

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", self.left or self.form is text)

    @property
    def title(self) -> str:
        """Return its heading."""
        return self.heading or self.name.replace("_", " ").replace(".", " ")

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the text of its cell in a row."""
        return self.form(*(_entry(row, name) for name in self.name.split())) if self.name else self.form(row)


def _entry(row: Any, name: str) -> Any:
    first, _, rest = name.partition(".")
    inside = row[int(first)] if isinstance(row, list) else row[first]
    return inside if not rest else _entry(inside, rest) if inside else None


_ENDLESS = 10_000
_PARTS = re.compile(r"(?<=[-.])")  # names are broken after hyphens and dots only
_FILE_WIDTH = 150  # columns of text where output goes to a file


def wide_console() -> Console:
    """Return a console on stdout (stderr with JSON), as wide as the terminal or ``COLUMNS``; wide for a file."""
    console = terminal(stderr=results_on_stderr())
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, _FILE_WIDTH)
    return console


def say_sentences(sentences: Iterable[str]) -> None:
    """Print sentences: on a terminal broken between words, in a file one a line."""
    console = wide_console()
    for sentence in sentences:
        console.print(sentence, soft_wrap=not console.is_terminal)


def not_shown(rows: int) -> str:
    """Say where to find the rows that a table leaves out."""
    return f"{rows} rows are not shown: --all shows them, and the page has them as CSV."


class NumberTable:
    """A table that fits the width of the terminal."""

    def __init__(
        self,
        columns: Iterable[Column],
        rows: Iterable[Mapping[str, Any]],
        title: str = "",
        caption: str = "",
        unit: object = "",
    ) -> None:
        listed, declared = list(rows), list(columns)
        cells = {column: [column.cell(row) for row in listed] for column in declared}
        shown = [one for one in declared if one.drop == NEVER or any(cell != "–" for cell in cells[one])]
        self.title, self.caption, self.columns = title, caption, [column.title.format(unit) for column in shown]
        self.rows = list(zip(*(cells[column] for column in shown), strict=True))
        self.names = sum(column.left for column in shown)
        places = [place for place, column in enumerate(shown) if not column.left]
        turns = [column.drop or len(shown) for column in shown]
        in_turn = sorted(places, key=lambda place: (shown[place].drop == NEVER, turns[place], -place))
        self._droppable = in_turn[: max(0, len(shown) - self.names - 1)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what rich needs to print the table."""

        def excess(table: Table) -> int:
            return console.measure(table, options=options.update(max_width=_ENDLESS)).maximum - options.max_width

        dropped: list[int] = []
        table = self._table(dropped, breaking=False)
        if excess(table) > 0:
            for count in range(len(self._droppable) + 1):
                dropped = self._droppable[:count]
                table = self._table(dropped)
                table = self._table(dropped, narrower=max(0, excess(table)))
                if excess(table) <= 0:
                    break
        if self.title:
            yield self.title
        yield table
        if dropped:
            missing = ", ".join(self.columns[place] for place in sorted(dropped))
            yield f"Left out to fit {options.max_width} columns: {missing}."

    def _table(self, dropped: Sequence[int], breaking: bool = True, narrower: int = 0) -> Table:
        """Return the table without some columns; ``narrower`` is how many columns of text its names give up."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=self.caption or None)
        columns = [[row[place] for row in self.rows] for place in range(len(self.columns))]
        for place, width in enumerate(self._widths_of_names(columns, narrower)):
            columns[place] = [_broken(name, width) for name in columns[place]]
        shown = [place for place in range(len(self.columns)) if place not in dropped]
        for place in shown:
            name = self.columns[place]
            words = [*name.split(), *(line for cell in columns[place] for line in cell.splitlines())]
            width = max(map(cell_len, words if breaking else [name]), default=1)
            heading = textwrap.wrap(name, width, break_long_words=False)
            table.add_column(
                "\n".join(heading), justify="left" if place < self.names else "right",
                no_wrap=place >= self.names, overflow="fold", vertical="top",
            )  # fmt: skip
        for cells in zip(*(columns[place] for place in shown), strict=True):
            table.add_row(*cells)
        return table

    def _widths_of_names(self, columns: Sequence[Sequence[str]], narrower: int) -> list[int]:
        """Return the widths of the columns of names: the widest shrinks first, none below its longest part."""
        names = columns[: self.names]
        widths = [max(map(cell_len, cells), default=0) for cells in names]
        least = [max((cell_len(p) for cell in cells for p in _PARTS.split(cell)), default=0) for cells in names]
        for _ in range(narrower):
            shrinkable = [place for place, width in enumerate(widths) if width > least[place]]
            if shrinkable:
                widths[max(shrinkable, key=widths.__getitem__)] -= 1
        return widths


def _broken(name: str, width: int) -> str:
    """Break a name after hyphens and dots into as many lines as it needs."""
    lines = [""]
    for part in _PARTS.split(name):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


class Answer(StrEnum):
    """The kinds of answers to a question of a report."""

    HOLDS = "holds"
    DOES_NOT = "does not hold"
    OPEN = "cannot tell"
    PLAUSIBLE = "plausible"  # sparse attention suffices
    COSTS = "not without loss"  # sparse attention does not suffice
    CHANGES = "not without change"  # the same for outputs without a known loss
    MEASURED = "measured"  # the question has no yes or no


@dataclass(frozen=True)
class Glance:
    """An answer at a glance."""

    answer: Answer  # in a word
    number: str  # with its denominator, like ``3 of 3 pairs``; empty if there is none
    words: str  # what the number counts
    # whether the answer is about a claim of the paper, and so says nothing good or bad about a model
    claim: bool = False

    def to_dict(self) -> dict[str, str | bool]:
        """Return plain values."""
        return {**asdict(self), "answer": self.answer.value}


def measured_glance(*tables: str) -> Callable[[Findings], Glance]:
    """Return the glance of a question without a single number: how many models were measured."""

    def glance(findings: Findings) -> Glance:
        measurements = findings.measurements
        models = {model for name in tables for model in getattr(measurements, name)["model"]}
        return Glance(
            Answer.MEASURED, f"{len(models)} of {counted(len(measurements.models), 'model')}", "measured"
        )

    return glance


def drawn_word(findings: Findings) -> str:
    """Return `` drawn`` if only some queries were measured, else nothing."""
    return " drawn" if drawn(findings) else ""


def top_words(findings: Findings) -> str:
    """Return ``top-5`` where all models that keep their largest scores keep as many of them, else ``top-k``."""
    models = findings.measurements.models
    ks = models[models["attention"] == "topk"]["k"].dropna().unique()
    return f"top-{int(ks[0])}" if len(ks) == 1 else "top-k"


def count_of(some: int, every: int, thing: str) -> str:
    """Return a count with its denominator, like ``3 of 4 pairs``."""
    return f"{some:,} of {every:,} {thing}{'s' * (every != 1)}"


def span_words(values: list[float], form: str | Callable[[float], str]) -> str:
    """Return one number, or the range of several, all finite."""
    words_of = form.format if isinstance(form, str) else form
    low, high = (re.sub("^-", "−", words_of(end)) for end in (min(values), max(values)))
    signed = any(end.startswith(("−", "<", ">")) for end in (low, high))  # −3 to 98, 85 to > 99.9
    return low if low == high else f"{low} to {high}" if signed else f"{low}–{high}"


def percent_span(shares: Iterable[float]) -> str:
    """Return one share in per cent, or the range of several, like ``50–98%``."""
    return span_words(list(shares), partial(whole_percent, sign="")) + "%"


Sentences = Callable[[Findings], list[str]]
Tables = Callable[[Findings, bool], Mapping[str, pd.DataFrame]]


@dataclass(frozen=True)
class Shown:
    """A figure in a section."""

    draw: Callable[[Findings], Figure]  # makes the figure from findings; its name is the figure's
    alt: str  # what it shows, for readers who cannot see it; ``{shown}`` becomes its legend and panel titles
    reading: str  # two sentences: what to look at, and what it means

    @property
    def figure(self) -> str:
        """Return the figure's name, which its files also have."""
        return self.draw.__name__


@dataclass(frozen=True)
class Heading:
    """A heading in a section."""

    anchor: str  # its identifier in the page
    title: str  # a question
    figures: tuple[Shown, ...]  # that answer it
    caveats: tuple[str, ...]  # what the answer does not cover


def _nothing(findings: Findings) -> list[str]:
    return []


def _no_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    return {}


def _always(findings: Findings) -> bool:
    return True


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    name: str  # command that measures it, if there is one
    needs: tuple[str, ...]  # tables of measurements of which at least one must have rows
    headings: tuple[Heading, ...]  # with its figures
    external: tuple[Heading, ...]  # headings for external models, of which only the attention is known
    measured: Callable[[Findings], bool] = _always  # a further condition for the section
    glance: Callable[[Findings], Glance] | None = None  # its answer at a glance, a tile on the first screen
    glanced: str = ""  # the anchor of the heading that the glance answers; empty: the first
    in_short: Sentences = _nothing  # its sentences for the first screen
    details: Sentences | None = None  # its sentences by model and pair; None: none
    verdicts: Callable[[Findings], list[Finding]] | None = None  # verdicts on its claims; None if it judges none
    tables: Tables = _no_tables  # by file name without suffix, written as CSV

    def applicable_headings(self, findings: Findings) -> tuple[Heading, ...]:
        """Return the headings that apply to the measured models."""
        return self.external if external(findings.measurements.models).all() else self.headings

    def applies(self, findings: Findings) -> bool:
        """Return whether there is something to show."""
        tables = [getattr(findings.measurements, name) for name in self.needs]
        measured = not tables or any(len(table) for table in tables)
        return measured and bool(self.applicable_headings(findings)) and self.measured(findings)


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
    Verdict.NOTHING: "nothing conclusive",
}


def print_verdicts(console: Console, judged: Iterable[Finding]) -> None:
    """Print a line for each finding, in red if semdiag contradicts itself."""
    for finding in judged:
        line = verdict_line(finding)
        console.print(line, style="red" if line.startswith("ERROR") else None)


def _number_words(numbers: Mapping[str, float]) -> Iterator[str]:
    """Yield the numbers beside a verdict; what a count or a logarithm means is said."""
    ends = [numbers[name] for name in _GAPS if name in numbers]
    if len(ends) == 2:
        yield f"bounds are {factors(*ends)} times what was measured"
    for name, value in numbers.items():
        if name in _COUNTED:
            yield from [_COUNTED[name].format(int(value))] if value else []
        elif name not in (*_COUNTS, *_GAPS):
            yield f"{name} = {finite(value)}"


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
    return findings.measurements.runs[_RUN_FACTS].merge(table, on="model")


def answers_with_facts(**answers: Callable[[Findings], pd.DataFrame]) -> Tables:
    """Return the tables of a section, each with the facts of its models in front."""
    return lambda findings, alone: {n: with_facts(findings, findings(answer)) for n, answer in answers.items()}


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
