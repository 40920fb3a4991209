"""The command that prints percentiles of one quantity of every query."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from semdiag.presenting import options
from semdiag.presenting.question import Command, Shared
from semdiag.presenting.terminal.titles import title

if TYPE_CHECKING:
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.findings.strict_json import Summary
    from semdiag.presenting.terminal.console import NumberTable


def percentile_command(metric: str, description: str, summary: "Callable[[Findings], Summary]") -> Command:
    """Make the command that measures a metric, prints its percentiles and writes its figures and tables.

    Args:
        metric: its name: the command's, and that of its section in reports.
        description: the command's help.
        summary: of findings, as ``--json`` prints it.
    """

    def command(models: options.Models = None, k: options.Counterfactual = "", *, shared: Shared) -> None:
        from semdiag.presenting.option_values import whole_numbers

        conditions = shared.conditions(k=whole_numbers(k, "--k"))
        findings = shared.measured(models, conditions)
        shared.deliver(metric, findings, partial(_print, metric, summary), _sections(metric, findings))

    command.__doc__ = description
    return Command(command, leave_out=(), sampling=True)


def _print(metric: str, summary: "Callable[[Findings], Summary]", findings: "Findings") -> None:
    from semdiag.measuring.findings.estimates import SAMPLED, drawn, sampling_sentences
    from semdiag.presenting.terminal.console import number_table, wide_console

    console = wide_console()
    for result in summary(findings)["results"]:
        of = f", {SAMPLED}" if result["model"] in drawn(findings) else ""
        for part in ("separation", "load") if metric == "separation" else ("dispersion",):
            more = ["≤ 0"] * (part == "separation") + ["recall", "no key"] * ("recall" in result["all"])
            heads = ["layer", "head", *_SHOWN, *more]
            table = number_table(heads, title=f"{title(result)}: {_TITLES[part]}{of}", least=_LEAST, kept=more)
            _fill(table, result, part)
            for within in result.get("within_model", []):
                _fill(table, within, part, f" k={within['k']}")
            console.print(table)
    for sentence in sampling_sentences(findings, (metric,)):
        console.print(sentence)


def _sections(metric: str, findings: "Findings") -> tuple[str, ...]:
    """Sections of the command's report: the metric, and where a k was asked for, what it would leave."""
    from semdiag.measuring.findings.counterfactuals import counterfactual_ks

    return (metric, "within") if counterfactual_ks(findings.measurements.queries) else (metric,)


_SHOWN = ("mean", "p5", "p50", "p75", "p90", "p95", "p100")
_LEAST = ("p75", "p90", "mean")  # which go first where the terminal is narrow
_TITLES = {
    "dispersion": "dispersion δ (nats)",
    "separation": "separation Δ (nats)",
    "load": "key load (queries)",
}


def _fill(table: "NumberTable", result: dict[str, Any], part: str, suffix: str = "") -> None:
    for row in [*result["layers"], {"layer": "all", "head": "", **result["all"]}]:
        numbers = row.get(part, row)
        cells = ["–" if numbers[p] is None else f"{numbers[p]:.3g}" for p in _SHOWN]
        if part == "separation":
            separated = numbers["queries"] - numbers["undefined"]
            cells.append(f"{numbers['not_positive'] / separated:.1%}" if separated else "–")
        cells += [f"{row[name]:.1%}" for name in ("recall", "without_keys") if name in row]
        table.add_row(f"{row['layer']}{suffix}", str(row["head"]), *cells)
