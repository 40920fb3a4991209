"""The figure of ``k-sweep``: what masks cost against the keys they keep, and against the length of the text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from semdiag.measuring.findings.estimates import pooled_percentiles
from semdiag.measuring.findings.findings import Findings, records
from semdiag.measuring.table import rows_of_model
from semdiag.measuring.words import counted
from semdiag.presenting.answer import heading, sentences_of
from semdiag.presenting.drawing.panels import NothingToDrawError, name_ends, short_labels
from semdiag.presenting.drawing.style import (
    FAINT,
    INK,
    PageFigure,
    drawing,
    mask_style,
    note_below,
    page_width,
    panel_grid,
    panel_inches,
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
KEEPING_K = "topk", "topk-layer", "topk-4-layers", "random"  # kinds that keep exactly k keys of every query
_FAR = 20  # ratio of the largest to the smallest share of keys above which their axis is logarithmic


@dataclass(frozen=True)
class _Costs:
    """The runs of a panel, with changes as they are drawn, and the unit of its axis."""

    rows: pd.DataFrame
    along: str  # column of the abscissae: ``kept`` or ``length``
    unit: Unit
    tolerance: float  # in nats, or a share of the norm

    @property
    def limit(self) -> float:
        """Return the largest change that counts as none, as it is drawn."""
        return float(_scaled(self.unit, np.array([self.tolerance]))[0])

    @property
    def floor(self) -> float:
        """Return the lower end of the axis."""
        return float(10.0 ** math.floor(math.log10(self.limit / 5)))

    @property
    def top(self) -> float:
        """Return the upper end of the axis."""
        ends = self.rows[["change", "high"]].to_numpy()
        return 1.3 * float(max(self.limit, ends.max(initial=0.0, where=np.isfinite(ends))))


def _costs(findings: Findings, rows: pd.DataFrame, along: str) -> _Costs:
    unit = unit_of(findings, str(rows["model"].iloc[0]))
    values = {name: _scaled(unit, rows[name].to_numpy(np.float64)) for name in ("change", "low", "high")}
    tolerance = tolerance_of(findings, str(rows["measure"].iloc[0]))
    return _Costs(rows.assign(**values).sort_values(along), along, unit, tolerance)


@drawing(
    "What running the model with masks costs, on a logarithmic axis: {shown}.",
    "The lowest line at the keys that you can afford is the cheapest choice of keys. Where its whole band is "
    "inside the shaded area, the cost counts as none.",
)
def cost(findings: Findings) -> Figure:
    """Draw what each kind of mask costs, against the keys it keeps and the length of the text."""
    labels, panels = _panels(findings)
    figure, axes = panel_grid(len(panels), height=_height(len(panels)), sharey=False)
    grid = axes[0].get_gridspec()
    if grid is not None and panels[-1].along == "length" and page_width() > 5:
        grid.set_width_ratios([1.6, 1])
    hollow = [_draw(figure, ax, panel, panels) for ax, panel in zip(axes, panels, strict=True)]
    for ax, panel in zip(axes, panels, strict=True):
        if panel.along == "length":
            _length_axis(ax, panel.rows)
            continue
        _keys_axis(findings, ax, panel)
        ax.set_title(wrapped(ax, _title(panel, labels)), fontweight="bold")
    figure.finding = ". ".join(" ".join(ax.get_title(loc="left").split()) for ax in axes)
    note_below(figure, _note(panels, any(hollow)))
    return figure


def _panels(findings: Findings) -> tuple[dict[str, str], list[_Costs]]:
    """Return the labels of all models, and the runs of each; of a single one those by length, too."""
    table = findings(change_table)
    table = table[table["mask"].isin(_kinds(table)) & (table["kept"] < 1)]
    labels = short_labels(findings.measurements.models) if len(table) else {}
    models = [model for model in labels if model in set(table["model"])]
    if not models:
        unasked = "No model was run with masks. To do so: semdiag k-sweep MODEL."
        raise NothingToDrawError(" ".join(sentences_of(failure_claims(findings))) or unasked)
    panels = [_costs(findings, table[table["model"] == model], "kept") for model in models]
    by_length = _fixed_k(findings, models[0])
    if len(models) == 1 and len(by_length):
        panels.append(_costs(findings, by_length, "length"))
    return {model: labels[model] for model in models}, panels


def _title(panel: _Costs, labels: Mapping[str, str]) -> str:
    """Return the label of the model, if there are several, and what its runs show."""
    finding = _finding(panel.rows)
    if len(labels) == 1:
        return finding or "What it costs to keep fewer keys"
    return ": ".join(filter(None, [labels[panel.rows["model"].iloc[0]], finding]))


def _note(panels: Sequence[_Costs], hollow: bool) -> str:
    """Return what the marks of all panels mean."""
    rows = pd.concat([panel.rows for panel in panels if panel.along == "kept"])
    sentences = [f"Points: means; bands: 95% intervals over {_bands(rows)}."]
    if hollow:
        sentences.append("Hollow points lie below the axis.")
    sentences.append(
        "Shaded: changes that count as none; where the cheapest line enters it, its k is marked, between two runs "
        "by interpolation."
    )
    if set(rows["mask"]) - set(KEEPING_K):
        sentences.append("Kinds stand at the share of all keys that they keep.")
    return " ".join(sentences)


def _height(panels: int) -> float:
    """Return the height of a panel in inches: less where there are several rows of them."""
    if page_width() < 5:
        return 4.0 if panels < 3 else 2.6
    return 3.4 if panels < 4 else 2.2


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


def _of_all_keys(findings: Findings, model: str) -> str:
    """Return ``, of 2,048``, the most keys that a query of a model has; empty if that is not known."""
    pooled = findings(pooled_percentiles, "keys")
    most = pooled[model]["p100"] if model in pooled else math.nan
    return f", of {most:,.0f}" if math.isfinite(most) else ""


def _keys_axis(findings: Findings, ax: Axes, panel: _Costs) -> None:
    """Name the shares of the keys by the k that keep them, and mark the k at which the cost counts as none."""
    shares = panel.rows["kept"]
    if shares.max() > _FAR * shares.min():
        ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    exact = panel.rows[panel.rows["mask"].isin(KEEPING_K)].drop_duplicates("k").sort_values("k")
    if exact.empty:
        ax.xaxis.set_major_formatter("{x:.0%}" if shares.min() > 0.01 else "{x:.1%}")
        ax.set_xlabel("share of the keys that a query keeps")
        return
    of_all = _of_all_keys(findings, str(panel.rows["model"].iloc[0]))
    ticks = _apart(ax, exact)
    ax.xaxis.set_major_locator(FixedLocator(ticks["kept"].tolist()))
    ax.xaxis.set_major_formatter(FixedFormatter([f"{k:,}" for k in ticks["k"]]))
    ax.set_xlabel(f"keys kept by a query{of_all}")
    if (crossing := _crossing(ax, panel)) is not None:
        share, k = crossing
        ax.plot(share, panel.limit, marker="|", markersize=11, markeredgewidth=1.6, color=INK, zorder=5)
        ax.annotate(
            f"k ≈ {k:,}{of_all.removeprefix(',')}", (share, panel.limit), xytext=(5, 3),
            textcoords="offset points", fontsize=9, color=INK, va="bottom", zorder=6,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip


_DIGIT = 0.085  # inches
_NAME = 1.3  # inches, of the names beside a panel


def _apart(ax: Axes, exact: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of which the numbers have room below an axis, the largest k first of all."""
    ax.get_xlim()  # which makes pending changes of the axis
    corners = np.column_stack([exact["kept"], np.ones(len(exact))])
    places = (ax.transData - ax.transAxes).transform(corners)[:, 0] * (panel_inches(ax) - _NAME)
    widths = [_DIGIT * (len(f"{k:,}") + 1) for k in exact["k"]]
    chosen = [len(exact) - 1]
    for at in reversed(range(len(exact) - 1)):
        if places[chosen[-1]] - places[at] >= (widths[chosen[-1]] + widths[at]) / 2:
            chosen.append(at)
    return exact.iloc[chosen[::-1]]


def _crossing(ax: Axes, panel: _Costs) -> tuple[float, int] | None:
    """Return share and k at which the cheapest line enters the shaded area for good; None if none does."""
    crossings = []
    for _, rows in panel.rows[panel.rows["mask"].isin({*KINDS} - {RANDOM, "topp"})].groupby("mask"):
        costs = rows["change"].clip(lower=panel.floor).to_numpy()
        above = np.flatnonzero(~(costs <= panel.limit))
        if not len(above) or above[-1] + 1 == len(costs) or not np.isfinite(costs).all():
            continue
        ends = slice(above[-1], above[-1] + 2)
        high, low = np.log(costs[ends])
        part = (high - math.log(panel.limit)) / (high - low)
        shares = rows["kept"].to_numpy()[ends]
        if ax.get_xscale() == "log":
            share = float(np.exp(np.interp(part, (0, 1), np.log(shares))))
        else:
            share = float(np.interp(part, (0, 1), shares))
        k = float(np.exp(np.interp(math.log(share), np.log(shares), np.log(rows["k"].to_numpy()[ends]))))
        crossings.append((share, _rounded_up(k)))
    return min(crossings, default=None)


def _rounded_up(k: float) -> int:
    """Return a whole number of at least k, of two digits that count."""
    unit = int(10.0 ** max(0, math.floor(math.log10(k)) - 1))
    return unit * math.ceil(round(k / unit, 6))


def _length_axis(ax: Axes, by_length: pd.DataFrame) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(by_length["length"].unique())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel(f"tokens in the text; {int(by_length['k'].iloc[0])} keys kept")
    ax.set_title(wrapped(ax, _length_finding(by_length)), fontweight="bold")


def _fixed_k(findings: Findings, model: str) -> pd.DataFrame:
    """Return what the largest k that was run at every length costs at each; empty for one length."""
    table = rows_of_model(findings(length_table), model)
    table = table[table["mask"].isin(set(_kinds(table)) - {RANDOM})]
    lengths = table.groupby("k")["length"].nunique()
    common = lengths[lengths == table["length"].nunique()].index
    return table[table["k"] == common.max()] if table["length"].nunique() > 1 and len(common) else table.iloc[:0]


def _finding(rows: pd.DataFrame) -> str:
    """Return what the choice of keys decides; empty where one kind was run."""
    kinds = rows[rows["mask"] != RANDOM]
    middle = kinds[(kinds["change"] > 0) & np.isfinite(kinds["change"])].groupby("k")["change"]
    spread = (middle.max() / middle.min())[middle.count() > 1]
    if spread.empty:
        return ""
    return "How the keys are chosen decides the cost" if spread.max() >= 2 else "All kinds cost much the same"


def _length_finding(rows: pd.DataFrame) -> str:
    ends = rows.sort_values("length").groupby("mask")[["low", "high"]].agg(["first", "last"])
    more = (ends["low", "last"] > ends["high", "first"]).mean()
    less = (ends["high", "last"] < ends["low", "first"]).mean()
    how = " costs more" if more > 0.5 else " costs less" if less > 0.5 else ""
    return f"A fixed k{how} on longer texts"


def _draw(figure: PageFigure, ax: Axes, panel: _Costs, panels: Sequence[_Costs]) -> bool:
    """Draw the lines of a panel, on the scale of all of the same unit; return whether a point is hollow."""
    alike = [each for each in panels if each.unit == panel.unit]
    floor = min(each.floor for each in alike)
    _cost_axis(ax, panel, floor, max(each.top for each in alike), named=len(alike) < len(panels))
    names: list[tuple[float, str, str, str]] = []
    hollow = False
    for kind in _kinds(panel.rows):
        of_kind = panel.rows[(panel.rows["mask"] == kind) & np.isfinite(panel.rows["change"])]
        if of_kind.empty:
            continue
        style = mask_style(kind)
        x = of_kind[panel.along].to_numpy()
        y = of_kind["change"].clip(lower=floor).to_numpy()
        low, high = (of_kind[name].clip(lower=floor).to_numpy() for name in ("low", "high"))
        group = f"{'lengths' if panel.along == 'length' else 'keys'}-{kind}"
        (line,) = ax.plot(x, y, color=style.color, linestyle=style.line, linewidth=style.width)
        line.set_gid(f"{group}--line")
        ax.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0).set_gid(f"{group}--band")
        for at, row in enumerate(records(of_kind)):
            below = row["change"] < floor
            hollow = hollow or below
            (point,) = ax.plot(
                x[at], y[at], color=style.color, marker=style.marker, markersize=5, clip_on=False,
                markerfacecolor="white" if below else style.color, linestyle="none",
            )  # fmt: skip
            point.set_gid(gid := f"{group}--point-{at}")
            figure.tooltips[gid] = _point_words(row, style.name, panel.along, panel.unit)
        names.append((float(y[-1]), style.name, style.color, f"{group}--name"))
    name_ends(ax, names)
    return hollow


def _cost_axis(ax: Axes, panel: _Costs, floor: float, top: float, *, named: bool) -> None:
    """Scale the axis of costs and shade what counts as none; its name stands once where all panels share it."""
    unit = panel.unit
    ax.set_yscale("log")
    ax.set_ylim(floor, top)
    ticks = [10.0**n for n in range(round(math.log10(floor)), math.floor(math.log10(top)) + 1)]
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    percent = unit.perplexity or unit.measure == "output_change"
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"+{100 * y:,.6g}%" if percent else f"+{y:,.6g}"))
    ax.axhspan(floor, panel.limit, color=mask_style("window").color, alpha=0.1, linewidth=0)
    ax.annotate(
        f"within {unit.limit(panel.tolerance)}", (0, panel.limit), xycoords=("axes fraction", "data"),
        xytext=(4, -3), textcoords="offset points", fontsize=9, color=FAINT, va="top",
    )  # fmt: skip
    place = ax.get_subplotspec()
    first = place is None or place.is_first_col()
    if named or first:
        ax.set_ylabel("increase of perplexity" if unit.perplexity else _CHANGES[unit.measure])
    else:
        ax.tick_params(labelleft=False)


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
