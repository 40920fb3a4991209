"""A command that prints percentiles of a quantity of every query."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from semdiag.presenting import options
from semdiag.presenting.question import Command, Shared
from semdiag.presenting.terminal.titles import title

if TYPE_CHECKING:
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.findings.strict_json import Summary


def percentile_command(metric: str, description: str, summary: "Callable[[Findings], Summary]") -> Command:
    """Return a command that measures a metric, prints its percentiles and writes its figures and tables.

    Args:
        metric: its name, also of the command and of its section in reports.
        description: the command's help.
        summary: of findings, as ``--json`` prints it.
    """

    def command(
        models: options.Models = None,
        k: options.Counterfactual = "",
        every: options.Every = False,
        *,
        shared: Shared,
    ) -> None:
        from semdiag.presenting.option_values import whole_numbers

        conditions = shared.conditions(k=whole_numbers(k, "--k"))
        findings = shared.measured(models, conditions)
        shared.deliver(metric, findings, partial(_print, metric, summary, every), _sections(metric, findings))

    command.__doc__ = description
    return Command(command, leave_out=(), sampling=True)


def _print(metric: str, summary: "Callable[[Findings], Summary]", every: bool, findings: "Findings") -> None:
    from semdiag.measuring.findings.estimates import SAMPLED, drawn, sampling_sentences
    from semdiag.presenting.columns import NEVER, Column, percent, plain, three_digits
    from semdiag.presenting.terminal.console import NumberTable, wide_console

    console = wide_console()
    columns = [Column("place", "layer", plain), Column("head", form=plain)]
    columns += [Column(p, form=three_digits, drop=_LEAST.get(p, 0)) for p in _SHOWN]
    for result in summary(findings)["results"]:
        of = f", {SAMPLED}" if result["model"] in drawn(findings) else ""
        for part in ("separation", "load") if metric == "separation" else ("dispersion",):
            within = result.get("within_model", [])
            if metric == "separation" and not within and result["all"]["separation"]["p50"] is None:
                console.print(f"\n{title(result)}: {_NOTHING_DROPPED}", soft_wrap=True)
                break
            rows, left_out = _rows(result, part, every)
            for one in within:
                more, further = _rows(one, part, every, f" k={one['k']}")
                rows, left_out = [*rows, *more], left_out + further
            last = [Column(*one, percent, NEVER) for one in _KEPT if any(one[0] in row for row in rows)]
            rows = [dict.fromkeys(column.name for column in last) | row for row in rows]
            console.print(NumberTable([*columns, *last], rows, f"{title(result)}: {_TITLES[part]}{of}"))
            if left_out:
                console.print(extremes(result, part), soft_wrap=True)
                console.print(f"{left_out} rows are not shown: --all shows them, and the page has them as CSV.")
    for sentence in sampling_sentences(findings, (metric,)):
        console.print(sentence)


def _sections(metric: str, findings: "Findings") -> tuple[str, ...]:
    """Return the sections of the command's report: the metric, and with ``--k`` what that k would leave."""
    from semdiag.measuring.findings.counterfactuals import counterfactual_ks

    return (metric, "within") if counterfactual_ks(findings.measurements.queries) else (metric,)


_SHOWN = ("mean", "p5", "p50", "p75", "p90", "p95", "p100")
_LEAST = {"p75": 1, "p90": 2, "mean": 3}  # which go first where the terminal is narrow
_KEPT = (("share_below", "≤ 0"), ("recall", "recall"), ("without_keys", "no key"))
_TITLES = {
    "dispersion": "dispersion δ (nats)",
    "separation": "separation Δ (nats)",
    "load": "key load (queries)",
}


_NOTHING_DROPPED = (
    "every query keeps every key, so no key is separated from others. Add --k 8 to ask what a top-k would drop."
)
_MOST = 24  # with more rows of heads, only the most extreme are shown
_FURTHEST = 5  # at each end


def _rows(result: dict[str, Any], part: str, every: bool, suffix: str = "") -> tuple[list[dict[str, Any]], int]:
    """Return the rows of the heads, of many those furthest out, and how many were left out."""
    heads = result["layers"]
    shown = heads if every or len(heads) <= _MOST else _furthest(heads, part)
    rows = []
    for row in [*shown, {"layer": "all", "head": "", **result["all"]}]:
        numbers = row.get(part, row)
        rows.append({**row, **numbers, "place": f"{row['layer']}{suffix}"})
        if part == "separation":
            separated = numbers["queries"] - numbers["undefined"]
            rows[-1]["share_below"] = numbers["not_positive"] / separated if separated else None
    return rows, len(heads) - len(shown)


def _median(row: dict[str, Any], part: str) -> float:
    from semdiag.measuring.findings.strict_json import number_from_json

    return number_from_json(row.get(part, row)["p50"])


def _by_median(heads: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """Return the heads with known median, the smallest first."""
    known = [row for row in heads if row.get(part, row)["p50"] is not None]
    return sorted(known, key=lambda row: _median(row, part))


def _furthest(heads: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """Return the heads with the smallest and the largest medians, in the order of the model."""
    known = _by_median(heads, part)
    ends = [*known[:_FURTHEST], *known[len(known) - _FURTHEST :]] if len(known) > 2 * _FURTHEST else known
    return [row for row in heads if any(row is end for end in ends)]


def extremes(result: dict[str, Any], part: str) -> str:
    """Return a sentence on the heads with the largest and the smallest median of a quantity.

    Args:
        result: of a model, as the summary has it.
        part: ``dispersion``, ``separation`` or ``load``.

    Example:
        >>> heads = [{"layer": 0, "head": h, "dispersion": {"p50": x}} for h, x in enumerate((1.0, 56.3, 2.0))]
        >>> extremes({"layers": heads}, "dispersion")
        'The median is largest in head 1 of layer 0 (56.3) and smallest in head 0 of layer 0 (1).'
    """
    known = _by_median(result["layers"], part)
    if not known:
        return "No head has a finite median."
    if len({_median(row, part) for row in known}) == 1:
        return f"The median is {_median(known[0], part):.3g} in every head."
    ends = [f"head {r['head']} of layer {r['layer']} ({_median(r, part):.3g})" for r in (known[-1], known[0])]
    return f"The median is largest in {ends[0]} and smallest in {ends[1]}."
