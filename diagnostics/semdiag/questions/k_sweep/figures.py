"""The figure of ``k-sweep``: what masks cost against the keys they keep, and against the length of the text."""

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from semdiag.measuring.findings.findings import Findings, records
from semdiag.measuring.table import rows_of_model
from semdiag.measuring.words import counted
from semdiag.presenting.answer import heading, sentences_of
from semdiag.presenting.drawing.panels import NothingToDrawError, name_ends, short_labels
from semdiag.presenting.drawing.style import (
    FAINT,
    PageFigure,
    drawing,
    mask_style,
    note_below,
    page_width,
    panel_grid,
    wrapped,
)
from semdiag.questions.k_sweep.budgets import KINDS, OF_ENGINES, RANDOM
from semdiag.questions.k_sweep.changes import (
    Unit,
    change_table,
    failure_claims,
    kind_of_unit,
    length_table,
    over_chunks,
    tolerance_of,
    unit_of,
)

_CHANGES = {
    "loss": "increase of the loss (nats)",
    "divergence": "change of the output distribution (KL, nats)",
    "output_change": "change of the outputs (of their norm)",
}
_FAR = 20  # ratio of the largest to the smallest share of keys above which their axis is logarithmic


@drawing(
    "What running the model with masks costs, on a logarithmic axis: {shown}.",
    "The lowest line at the share of the keys that you can afford is the cheapest choice of keys. Where its whole "
    "band is inside the shaded area, the cost counts as none.",
)
def cost(findings: Findings) -> Figure:
    """Draw what each kind of mask costs, against the keys it keeps and the length of the text."""
    table = findings(change_table)
    table = table[table["mask"].isin(_kinds(table)) & (table["kept"] < 1)]
    labels = short_labels(findings.measurements.models) if len(table) else {}
    models = [model for model in labels if model in set(table["model"])]
    if not models:
        unasked = "No model was run with masks. To do so: semdiag k-sweep MODEL."
        raise NothingToDrawError(" ".join(sentences_of(failure_claims(findings))) or unasked)
    by_length = _fixed_k(findings, models[0]) if len(models) == 1 else table.iloc[:0]
    panels = len(models) + bool(len(by_length))
    height = 3.4 if page_width() > 5 else 4
    figure, axes = panel_grid(panels, height=height, sharey=False)
    grid = axes[0].get_gridspec()
    if grid is not None and len(by_length) and page_width() > 5:
        grid.set_width_ratios([1.6, 1])
    for ax, model in zip(axes, models, strict=False):
        rows = table[table["model"] == model]
        _draw(figure, ax, findings, rows, "kept")
        ax.set_xlabel("keys kept by a query")
        _share_axis(ax, rows["kept"])
        name = f"{labels[model]}: " if len(models) > 1 else ""
        ax.set_title(wrapped(ax, name + _finding(rows)), fontweight="bold")
    if len(by_length):
        ax = axes[-1]
        _draw(figure, ax, findings, by_length, "length")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(sorted(by_length["length"].unique())))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set_xlabel(f"tokens in the text; {int(by_length['k'].iloc[0])} keys kept")
        ax.set_title(wrapped(ax, _length_finding(by_length)), fontweight="bold")
    figure.finding = ". ".join(" ".join(ax.get_title(loc="left").split()) for ax in axes)
    note_below(
        figure,
        f"Points: means; bands: 95% intervals over {_bands(table)}. Hollow points lie below the axis. Shaded: "
        "changes that count as none. A share is of the keys of all queries together, those with few keys "
        "included.",
    )
    return figure


def _bands(table: pd.DataFrame) -> str:
    """Return what the intervals of a table are about."""
    kinds = dict.fromkeys(kind_of_unit(row) for row in records(table))
    return " or ".join(kind.replace("inputs", "inputs like these") for kind in kinds)


def _kinds(rows: pd.DataFrame) -> list[str]:
    """Return the kinds of masks that were run, those of engines last; budgets are none."""
    names = set(rows["mask"])
    return [kind for kind in KINDS if kind in names] + sorted(
        kind for kind in names if kind.startswith(OF_ENGINES)
    )


def _share_axis(ax: Axes, shares: pd.Series) -> None:
    smallest = float(shares.min())
    if shares.max() > _FAR * smallest:
        ax.set_xscale("log")
        shares_marked = [share for share in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1) if share >= smallest / 2]
        ax.xaxis.set_major_locator(FixedLocator(shares_marked))
        ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:.0%}" if smallest > 0.01 else "{x:.1%}")


def _fixed_k(findings: Findings, model: str) -> pd.DataFrame:
    """Return what the largest k that was run at every length costs at each; empty for one length."""
    table = rows_of_model(findings(length_table), model)
    table = table[table["mask"].isin(set(_kinds(table)) - {RANDOM})]
    lengths = table.groupby("k")["length"].nunique()
    common = lengths[lengths == table["length"].nunique()].index
    return table[table["k"] == common.max()] if table["length"].nunique() > 1 and len(common) else table.iloc[:0]


def _finding(rows: pd.DataFrame) -> str:
    kinds = rows[rows["mask"] != RANDOM]
    middle = kinds[(kinds["change"] > 0) & np.isfinite(kinds["change"])].groupby("k")["change"]
    spread = (middle.max() / middle.min())[middle.count() > 1]
    if spread.empty:
        return "What it costs to keep fewer keys"
    return "How the keys are chosen decides the cost" if spread.max() >= 2 else "All kinds cost much the same"


def _length_finding(rows: pd.DataFrame) -> str:
    ends = rows.sort_values("length").groupby("mask")[["low", "high"]].agg(["first", "last"])
    more = (ends["low", "last"] > ends["high", "first"]).mean()
    less = (ends["high", "last"] < ends["low", "first"]).mean()
    how = " costs more" if more > 0.5 else " costs less" if less > 0.5 else ""
    return f"A fixed k{how} on longer texts"


def _draw(figure: PageFigure, ax: Axes, findings: Findings, rows: pd.DataFrame, along: str) -> None:
    measure = str(rows["measure"].iloc[0])
    unit = unit_of(findings, str(rows["model"].iloc[0]))
    tolerance = tolerance_of(findings, measure)
    limit = _scaled(unit, np.array([tolerance]))[0]
    floor = 10.0 ** math.floor(math.log10(limit / 5))
    values = {name: _scaled(unit, rows[name].to_numpy(np.float64)) for name in ("change", "low", "high")}
    rows = rows.assign(**values).sort_values(along)
    ends = rows[["change", "high"]].to_numpy()
    largest = max(limit, ends.max(initial=0.0, where=np.isfinite(ends)))
    ax.set_yscale("log")
    ax.set_ylim(floor, 1.3 * largest)
    ticks = [10.0**n for n in range(round(math.log10(floor)), math.floor(math.log10(1.3 * largest)) + 1)]
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    percent = unit.perplexity or measure == "output_change"
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"+{100 * y:,.6g}%" if percent else f"+{y:,.6g}"))
    ax.axhspan(floor, limit, color=mask_style("window").color, alpha=0.1, linewidth=0)
    ax.annotate(
        f"within {unit.limit(tolerance)}", (0, limit), xycoords=("axes fraction", "data"), xytext=(4, -3),
        textcoords="offset points", fontsize=9, color=FAINT, va="top",
    )  # fmt: skip
    ax.set_ylabel("increase of perplexity" if unit.perplexity else _CHANGES[measure])
    names: list[tuple[float, str, str, str]] = []
    for kind in _kinds(rows):
        of_kind = rows[(rows["mask"] == kind) & np.isfinite(rows["change"])]
        style = mask_style(kind)
        if of_kind.empty:
            continue
        x = of_kind[along].to_numpy()
        y = of_kind["change"].clip(lower=floor).to_numpy()
        low, high = (of_kind[name].clip(lower=floor).to_numpy() for name in ("low", "high"))
        group = f"{'lengths' if along == 'length' else 'keys'}-{kind}"
        (line,) = ax.plot(x, y, color=style.color, linestyle=style.line, linewidth=style.width)
        line.set_gid(f"{group}--line")
        ax.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0).set_gid(f"{group}--band")
        for at, row in enumerate(records(of_kind)):
            below = row["change"] < floor
            (point,) = ax.plot(
                x[at], y[at], color=style.color, marker=style.marker, markersize=5, clip_on=False,
                markerfacecolor="white" if below else style.color, linestyle="none",
            )  # fmt: skip
            point.set_gid(gid := f"{group}--point-{at}")
            figure.tooltips[gid] = _point_words(row, style.name, along, unit)
        names.append((float(y[-1]), style.name, style.color, f"{group}--name"))
    name_ends(ax, names)


def _scaled(unit: Unit, nats: np.ndarray) -> np.ndarray:
    return np.expm1(np.minimum(nats, 50)) if unit.perplexity else nats


def _point_words(row: dict[str, Any], name: str, along: str, unit: Unit) -> str:
    shares = unit.perplexity or unit.measure == "output_change"
    low, cost, high = (
        (f"{100 * row[end]:+,.3g}%" if shares else f"{row[end]:+.3g} nats") for end in ("low", "change", "high")
    )
    k = "" if row["mask"] == "topp" else f"k = {row['k']}, "
    length = f" of {counted(int(row['length']), 'token')}" if along == "length" else ""
    over = " over pieces of the inputs" if length else over_chunks(row)
    interval = f" (95% interval {low} to {high}{over})" if math.isfinite(row["low"]) else ""
    return f"{name}, {k}{row['kept']:.1%} of the keys{length}: {cost}{interval}"


HEADINGS = heading(
    "k-sweep", "What would sparse attention cost this model?", (cost,),
    "Masks rank the model's own scores: a model trained with that k has others.",
    "Top-k of each head keeps the most weight of all choices of k keys, not always the lowest loss.",
    "The weight kept and the paper's conditions, which need no run, do not tell the cost: they are in the tables.",
)  # fmt: skip
