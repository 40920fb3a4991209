"""The contract of a question and of its command, and the command that prints percentiles of a quantity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from semdiag.presenting import options

if TYPE_CHECKING:
    from semdiag.capturing.loading import LoadedModel
    from semdiag.measuring.findings.findings import Findings, Summary
    from semdiag.measuring.measure import Conditions
    from semdiag.measuring.probe import Probe
    from semdiag.presenting.section import Section

ANSWERS = 5  # sentences of an answer, at most, on the terminal


class Shared(Protocol):
    """The values of the options that the measuring commands share."""

    values: dict[str, Any]  # by name; options that the command does not take are absent
    typed: frozenset[str]  # names of options, shared or the command's own, that differ from their defaults

    def conditions(self, keep_queries: bool = False, **more: Any) -> "Conditions":
        """Return the conditions for measuring; ``more`` are fields that the command sets."""

    def measured(
        self,
        models: Sequence[Path] | None,
        conditions: "Conditions",
        run: Callable[..., Any] | None = None,
        more_stages: int = 0,
        against: Path | None = None,
        then: "Callable[[Sequence[LoadedModel]], object]" = lambda loaded: None,
    ) -> "Findings":
        """Measure what the user named, with progress; ``then`` is called with the loaded models."""

    def deliver(
        self,
        command: str,
        findings: "Findings",
        show: Callable[["Findings"], None],
        sections: Sequence[str] | None = None,
        answered: bool = False,
    ) -> None:
        """Write the page, print answer and tables, and the summary with ``--json``."""


@dataclass(frozen=True)
class Command:
    """A command that measures: its own options, and which of the shared ones it takes."""

    run: Callable[..., None]  # called with its own options and ``shared``, a :class:`Shared`
    leave_out: tuple[str, ...] = ("per_query",)  # shared options that it does not take
    sampling: bool = False  # whether it takes the options that draw queries
    defaults: dict[str, Any] = field(
        default_factory=dict
    )  # values of shared options that differ from the usual ones


def command(
    leave_out: Sequence[str] = ("per_query",), *, sampling: bool = False, **defaults: Any
) -> Callable[[Callable[..., None]], Command]:
    """Turn a function with a keyword ``shared`` into a command; arguments as in :class:`Command`."""
    return lambda run: Command(run, tuple(leave_out), sampling, defaults)


@dataclass(frozen=True)
class Question:
    """A question that semdiag answers."""

    name: str  # name of its command, its summary and its section of a report
    package: str  # the folder, as a dotted name
    measured_by: str = ""  # a :class:`~semdiag.measuring.probe.Probe`
    summarised_by: str = ""  # a function of findings that returns what ``--json`` prints
    shown_by: str = ""  # a :class:`~semdiag.presenting.section.Section` of the report
    asked_by: str = ""  # a :class:`Command`

    def _part(self, where: str) -> Any:
        module, _, attribute = where.partition(":")
        return getattr(import_module(f"{self.package}.{module}".rstrip(".")), attribute) if where else None

    @cached_property
    def probe(self) -> "Probe | None":
        """Return its probe; None if it needs no measurement of its own."""
        part: Probe | None = self._part(self.measured_by)
        return part

    @cached_property
    def summary(self) -> "Callable[[Findings], Summary] | None":
        """Return the function that makes what ``--json`` prints."""
        part: Callable[[Findings], Summary] | None = self._part(self.summarised_by)
        return part

    @cached_property
    def section(self) -> "Section | None":
        """Return its section of a report."""
        part: Section | None = self._part(self.shown_by)
        return part

    @cached_property
    def command(self) -> Command | None:
        """Return its command."""
        part: Command | None = self._part(self.asked_by)
        return part


def title(result: dict[str, Any]) -> str:
    """Return a model's title: its path, its task if it has one, its attention."""
    task = f"{result['task']} " if result["task"] else ""
    return f"{result['model']}  {task}{result['attention']}"


def percentile_command(metric: str, description: str, summary: "Callable[[Findings], Summary]") -> Command:
    """Return a command that measures a metric, prints its percentiles and writes its figures and tables."""

    def command(
        models: options.Models = None,
        k: options.Counterfactual = "",
        every: options.Every = False,
        *,
        shared: Shared,
    ) -> None:
        from semdiag.presenting.options import whole_numbers

        conditions = shared.conditions(k=whole_numbers(k, "--k"))
        findings = shared.measured(models, conditions)
        shared.deliver(metric, findings, partial(_print, metric, summary, every), _sections(metric, findings))

    command.__doc__ = description
    return Command(command, leave_out=(), sampling=True)


def _print(metric: str, summary: "Callable[[Findings], Summary]", every: bool, findings: "Findings") -> None:
    from semdiag.measuring.findings.estimates import SAMPLED, drawn, sampling_sentences
    from semdiag.measuring.findings.findings import modules_by_layer
    from semdiag.measuring.words import percent
    from semdiag.presenting.section import (
        NEVER,
        Column,
        NumberTable,
        not_shown,
        plain,
        three_digits,
        wide_console,
    )

    console = wide_console()
    columns = [Column("place", "layer", plain), Column("head", form=plain)]
    columns += [Column(p, form=three_digits, drop=_DROPPED.get(p, 0)) for p in _PERCENTILES]
    for result in summary(findings)["results"]:
        counterfactuals = result.get("within_model", [])
        if metric == "separation" and not counterfactuals and result["all"]["separation"]["p50"] is None:
            console.print(f"\n{title(result)}: {_NOTHING_DROPPED}", soft_wrap=True)
            continue
        sampled = f", {SAMPLED}" if result["model"] in drawn(findings) else ""
        modules = findings(modules_by_layer, result["model"])
        for quantity in ("separation", "load") if metric == "separation" else ("dispersion",):
            rows = _rows(result, quantity, every, modules)
            for one in counterfactuals:
                rows += _rows(one, quantity, every, modules, f" k={one['k']}")
            shares = [Column(*share, percent, NEVER) for share in _SHARES if any(share[0] in row for row in rows)]
            rows = [dict.fromkeys(column.name for column in shares) | row for row in rows]
            console.print(
                NumberTable([*columns, *shares], rows, f"\n{title(result)}: {_TITLES[quantity]}{sampled}")
            )
            hidden = sum(len(one["layers"]) + 1 for one in (result, *counterfactuals)) - len(rows)
            if hidden:
                console.print(extremes(result, quantity, modules), soft_wrap=True)
                console.print(not_shown(hidden))
    for sentence in sampling_sentences(findings, (metric,)):
        console.print(sentence)


def _sections(metric: str, findings: "Findings") -> tuple[str, ...]:
    """Return the sections of the command's report: the metric, and with ``--k`` what a top-k mask would leave."""
    from semdiag.measuring.findings.estimates import counterfactual_ks

    return (metric, "within") if counterfactual_ks(findings.measurements.queries) else (metric,)


_PERCENTILES = ("mean", "p5", "p50", "p75", "p90", "p95", "p100")
_DROPPED = {"p75": 1, "p90": 2, "mean": 3}  # in this order, where the terminal is narrow
_SHARES = (("share_below", "≤ 0"), ("recall", "recall"), ("without_keys", "no key"))
_TITLES = {
    "dispersion": "dispersion δ (nats)",
    "separation": "separation Δ (nats)",
    "load": "key load (queries)",
}


_NOTHING_DROPPED = (
    "every query keeps every key, so no key is separated from others. Add --k 8 to ask what a top-k would drop."
)
_MOST_HEADS = 24  # of more, only the extreme ones are shown
_EXTREME = 5  # heads at each end


def _rows(
    result: dict[str, Any], quantity: str, every: bool, modules: Sequence[str], suffix: str = ""
) -> list[dict[str, Any]]:
    """Return a row for each head, or of many heads for those with extreme medians, and one for all heads."""
    from semdiag.measuring.words import layer_name

    heads = result["layers"]
    shown = heads if every or len(heads) <= _MOST_HEADS else _extreme(heads, quantity)
    rows = []
    for row in [*shown, {"layer": "all", "head": "", **result["all"]}]:
        numbers = row.get(quantity, row)
        layer = row["layer"] if row["layer"] == "all" else layer_name(row["layer"], modules)
        rows.append({**row, **numbers, "place": f"{layer}{suffix}"})
        if quantity == "separation":
            separated = numbers["queries"] - numbers["undefined"]
            rows[-1]["share_below"] = numbers["not_positive"] / separated if separated else None
    return rows


def _median(row: dict[str, Any], quantity: str) -> float:
    from semdiag.measuring.words import number_from_json

    return number_from_json(row.get(quantity, row)["p50"])


def _by_median(heads: list[dict[str, Any]], quantity: str) -> list[dict[str, Any]]:
    """Return the heads with known median, the smallest first."""
    known = [row for row in heads if row.get(quantity, row)["p50"] is not None]
    return sorted(known, key=lambda row: _median(row, quantity))


def _extreme(heads: list[dict[str, Any]], quantity: str) -> list[dict[str, Any]]:
    """Return the heads with the smallest and the largest medians, in the order of the model."""
    known = _by_median(heads, quantity)
    ends = [*known[:_EXTREME], *known[-_EXTREME:]] if len(known) > 2 * _EXTREME else known
    return [row for row in heads if any(row is end for end in ends)]


def extremes(result: dict[str, Any], quantity: str, modules: Sequence[str]) -> str:
    """Return a sentence on the heads with the largest and the smallest median of a quantity."""
    from semdiag.measuring.words import layer_name

    known = _by_median(result["layers"], quantity)
    if not known:
        return "No head has a finite median."
    if len({_median(row, quantity) for row in known}) == 1:
        return f"The median is {_median(known[0], quantity):.3g} in every head."
    ends = [
        f"head {row['head']} of layer {layer_name(row['layer'], modules)} ({_median(row, quantity):.3g})"
        for row in (known[-1], known[0])
    ]
    return f"The median is largest in {ends[0]} and smallest in {ends[1]}."
