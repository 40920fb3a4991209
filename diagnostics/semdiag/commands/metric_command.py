"""What the commands that measure one quantity have in common."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from semdiag.commands import options
from semdiag.commands.titles import title

if TYPE_CHECKING:
    from rich.table import Table

    from semdiag.measurement.measurements import Measurements


def metric_command(metric: str, description: str) -> Callable[..., None]:
    """Make the command that measures a metric, prints its percentiles and writes its figures and tables.

    Args:
        metric: its name: the command's, and that of its summary and of its section in reports.
        description: the command's help.

    Returns:
        A function for typer.
    """

    def command(
        models: options.Models = None,
        k: options.Counterfactual = "",
        inputs: options.Inputs = None,
        samples: options.Samples = 500,
        batch_size: options.BatchSize = 100,
        device: options.Device = "auto",
        dtype: options.Dtype = "auto",
        seed: options.Seed = 0,
        min_keys: options.MinKeys = 1,
        config: options.Config = None,
        out: options.Out = None,
        as_json: options.Json = False,
        per_query: options.PerQuery = None,
        figures: options.Figures = "png,svg",
        quiet: options.Quiet = False,
    ) -> None:
        from semdiag.commands import measuring
        from semdiag.measurement.summaries import SUMMARIES
        from semdiag.measurement.survey import Conditions

        conditions = Conditions(
            inputs=inputs,
            samples=samples,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            seed=seed,
            min_keys=min_keys,
            k=measuring.whole_numbers(k, "--k"),
            config=measuring.read_config(config),
        )
        formats = measuring.figure_formats(figures)
        measuring.check_per_query(per_query)
        found = measuring.measured(models, conditions, quiet)
        measuring.deliver(
            metric, found, SUMMARIES[metric](found), partial(_print, metric),
            out=out, formats=formats, as_json=as_json, quiet=quiet, sections=_sections(metric, found),
            per_query=per_query,
        )  # fmt: skip

    command.__doc__ = description
    return command


def _print(metric: str, summary: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from semdiag.commands.console import wide_console

    console = wide_console()
    for result in summary["results"]:
        for part in ("separation", "load") if metric == "separation" else ("dispersion",):
            table = Table(
                title=f"{title(result)}: {_TITLES[part]}",
                title_justify="left",
                box=SIMPLE_HEAD,
                padding=(0, 1, 0, 0),
            )
            _fill(table, result, part)
            for within in result.get("within_model", []):
                _fill(table, within, part, f" k={within['k']}")
            console.print(table)


def _sections(metric: str, measurements: "Measurements") -> tuple[str, ...]:
    """Sections of the command's report: the metric, and where a k was asked for, what it would leave."""
    from semdiag.measurement.summaries import counterfactual_ks

    return (metric, "within") if counterfactual_ks(measurements.queries) else (metric,)


_SHOWN = ("mean", "p5", "p50", "p75", "p90", "p95", "p100")
_TITLES = {
    "dispersion": "dispersion δ (nats)",
    "separation": "separation Δ (nats)",
    "load": "key load (queries)",
}


def _fill(table: "Table", result: dict[str, Any], part: str, suffix: str = "") -> None:
    if not table.columns:
        for name in ("layer", "head", *_SHOWN):
            table.add_column(name, justify="right")
        if part == "separation":
            table.add_column("≤ 0", justify="right")
    for row in [*result["layers"], {"layer": "all", "head": "", **result["all"]}]:
        numbers = row.get(part, row)
        cells = ["–" if numbers[p] is None else f"{numbers[p]:.3g}" for p in _SHOWN]
        if part == "separation":
            cells.append(f"{numbers['not_positive'] / max(1, numbers['queries']):.1%}")
        table.add_row(f"{row['layer']}{suffix}", str(row["head"]), *cells)
