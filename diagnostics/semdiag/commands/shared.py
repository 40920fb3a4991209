"""The options that the measuring commands share, given to a command in one line."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Command

if TYPE_CHECKING:
    from semdiag.capturing.loading import LoadedModel
    from semdiag.measuring.conditions import Conditions
    from semdiag.measuring.findings.findings import Findings

# Name, type with help, default; in the order of the help.
_SHARED: dict[str, tuple[Any, Any]] = {
    "inputs": (options.Inputs, None),
    "max_length": (options.MaxLength, None),
    "tokenizer": (options.Tokenizer, None),
    "labels": (options.Labels, None),
    "samples": (options.Samples, 500),
    "batch_size": (options.BatchSize, 100),
    "device": (options.Device, "auto"),
    "dtype": (options.Dtype, "auto"),
    "seed": (options.Seed, 0),
    "min_keys": (options.MinKeys, 1),
    "queries": (options.Queries, None),
    "max_queries": (options.MaxQueries, 20_000_000),
    "config": (options.Config, None),
    "head": (options.Head, "auto"),
    "jobs": (options.Jobs, None),
    "ray": (options.Ray, ""),
    "out": (options.Out, None),
    "as_json": (options.Json, False),
    "per_query": (options.PerQuery, None),
    "figures": (options.Figures, "png,svg"),
    "quiet": (options.Quiet, False),
}
_OF_TEXTS = ("max_length", "tokenizer", "labels")
_SAMPLING = ("queries", "max_queries")
_OF_CONDITIONS = ("inputs", "samples", "batch_size", "device", "dtype", "seed", "min_keys", "head", *_SAMPLING)


@dataclass(frozen=True)
class Shared:
    """The shared options: implements :class:`semdiag.presenting.question.Shared`."""

    values: dict[str, Any]
    typed: frozenset[str]

    def conditions(self, keep_queries: bool = False, **more: Any) -> "Conditions":
        """Return the conditions of the measurement; every option is checked first."""
        from semdiag.capturing.inputs.texts import TextOptions
        from semdiag.commands import measuring
        from semdiag.measuring.conditions import Conditions

        measuring.figure_formats(self.values.get("figures", ""))
        measuring.check_per_query(self.values.get("per_query"))
        measuring.check_out(self.values.get("out"), keep_queries)
        values = {name: self.values[name] for name in _OF_CONDITIONS if name in self.values}
        texts = TextOptions(*(self.values.get(name) for name in _OF_TEXTS))
        return Conditions(**values, texts=texts, config=measuring.read_config(self.values.get("config")), **more)

    def measured(
        self,
        models: Sequence[Path] | None,
        conditions: "Conditions",
        run: Callable[..., Any] | None = None,
        more_stages: int = 0,
        against: Path | None = None,
        then: "Callable[[Sequence[LoadedModel]], object]" = lambda loaded: None,
    ) -> "Findings":
        """Measure what the user named: :func:`~semdiag.commands.measuring.measured`."""
        from semdiag.commands import measuring
        from semdiag.commands.processes import in_processes

        quiet = self.values["quiet"]
        run = run or in_processes(self.values.get("jobs"), self.values.get("ray", ""))
        return measuring.measured(models, conditions, quiet, run, more_stages, against, self.typed, then)

    def deliver(
        self,
        command: str,
        findings: "Findings",
        show: Callable[["Findings"], None],
        sections: Sequence[str] | None = None,
        answered: bool = False,
    ) -> None:
        """Deliver the results: :func:`~semdiag.commands.measuring.deliver`."""
        from semdiag.commands import measuring

        measuring.deliver(command, findings, show, self.values, sections, answered)


def with_options(command: Command) -> Callable[..., None]:
    """Give a command the shared options; it receives them as its argument ``shared``."""
    names = [
        name
        for name in _SHARED
        if name not in command.leave_out
        and (command.sampling or name not in _SAMPLING)
        and not (name in _OF_TEXTS and "inputs" in command.leave_out)
    ]

    def with_shared(context: typer.Context, **given: Any) -> None:
        sources = {name: context.get_parameter_source(name) for name in given}
        # Before click 8.2, an omitted argument counts as given on the command line, as None.
        typed = frozenset(
            name
            for name, source in sources.items()
            if source and source.name == "COMMANDLINE" and given[name] is not None
        )
        shared = Shared({name: given.pop(name) for name in names}, typed)
        command.run(**given, shared=shared)

    own_parameters = [p for p in inspect.signature(command.run).parameters.values() if p.name != "shared"]
    shared_parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=command.defaults.get(name, _SHARED[name][1]),
            annotation=_SHARED[name][0],
        )
        for name in names
    ]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *own_parameters, *shared_parameters]
    with_shared.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_shared.__annotations__ = {p.name: p.annotation for p in parameters}
    with_shared.__doc__, with_shared.__name__ = command.run.__doc__, command.run.__name__
    return with_shared
