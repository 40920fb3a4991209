"""Models in panels that differ in nothing but attention, their labels, and ranges in words."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike, NDArray

from semdiag.capturing.attention_call import external
from semdiag.measuring.findings.findings import RUN_AND_SNAPSHOT, path_tail, seed_names
from semdiag.measuring.metrics import metric_of
from semdiag.measuring.words import number
from semdiag.presenting.drawing.style import (
    ATTENTION_STYLES,
    DARK_MAP,
    DEEP_CELL,
    LIGHT_MAP,
    PALE_CELL,
    AttentionStyle,
    attention_style,
    lightened,
    note_below,
    number_layers,
    panel_grid,
    panel_inches,
    paper_style,
    plain_numbers,
)

_MARKERS = "osD^vPX*"
_LIGHTEST = 0.6  # share of white in the last of several models of one attention
_SNAPSHOT_NAMES = {"initialisation": "at initialisation", "best": "best snapshot"}


class NothingToDrawError(ValueError):
    """Raised if a figure has nothing to show for these measurements; the message says why."""


@dataclass(frozen=True)
class Series:
    """One model in a panel."""

    model: str  # its path, as in the tables of measurements
    attention: str  # its kind
    k: int | None  # keys kept per query; None for full attention
    label: str  # for the legend
    style: AttentionStyle  # colour, marker, line


@dataclass(frozen=True)
class Panel:
    """Models of the same task, seed, size, setting and snapshot."""

    title: str  # common properties in which other panels differ
    series: tuple[Series, ...]  # one entry per model, full attention first
    snapshot: str = ""  # ``last``, ``initialisation``, … ; empty if snapshots do not matter


def panels_of(
    models: pd.DataFrame, keys: Sequence[str] = RUN_AND_SNAPSHOT, seeds: Mapping[Any, str] | None = None
) -> list[Panel]:
    """Group models into panels, last snapshots before all others.

    ``seeds``: what seeds are called, where the models are some of those that were measured.
    """
    if models.empty:
        raise NothingToDrawError("No model was measured.")
    seeds = seed_names(models) if seeds is None else seeds
    foreign = external(models)
    differing = [key for key in keys if models[~foreign][key].nunique(dropna=False) > 1]
    own_panel = models["model"].where(foreign, "")  # external models have nothing known in common
    panels = []
    for _, group in models.groupby([*keys, own_panel.rename("_own")], dropna=False, sort=False):
        snapshot = str(group["snapshot"].iloc[0]) if "snapshot" in keys else ""
        name = str(own_panel[group.index[0]])
        title = path_tail(name, models["model"]) if name else _title(group.iloc[0].to_dict(), differing, seeds)
        panels.append(Panel(title, _series(group), snapshot))
    return sorted(panels, key=lambda panel: panel.snapshot not in ("last", ""))


def model_labels(models: pd.DataFrame) -> dict[str, str]:
    """Return each model in words, like ``even-pairs, top-k (k = 5)``."""
    return {s.model: f"{panel.title}, {s.label}" for panel in panels_of(models) for s in panel.series}


def short_labels(models: pd.DataFrame) -> dict[str, str]:
    """Return each model in few words, for ticks: what distinguishes it from the others."""
    full_labels = model_labels(models)
    tasks = dict(zip(models["model"], models["task"], strict=True)) if models["task"].nunique() > 1 else {}
    labels = {s.model: s.label for panel in panels_of(models) for s in panel.series}
    short = {model: f"{tasks[model]}, {label}" if model in tasks else label for model, label in labels.items()}
    all_labels = list(short.values())
    return {model: label if all_labels.count(label) == 1 else full_labels[model] for model, label in short.items()}


def attention_label(kind: str, k: int | None, global_tokens: int = 0) -> str:
    """Return an attention's name for a legend, like ``top-k (k = 5)`` or ``banded (k = 5 + 1 global)``."""
    name = attention_style(kind).name
    more = f" + {global_tokens} global" if global_tokens else ""
    return name if k is None or kind == "full" else f"{name} (k = {k}{more})"


def _title(row: dict[Hashable, Any], differing: list[str], seeds: Mapping[Any, str]) -> str:
    parts = ["task unknown" if pd.isna(row["task"]) else str(row["task"])]
    for key in differing:
        if key == "snapshot":
            parts.append(_SNAPSHOT_NAMES.get(str(row[key]), f"{row[key]} snapshot"))
        elif key == "seed" and not pd.isna(row[key]):
            parts.append(f"seed {seeds.get(row[key], row[key])}")
        elif key != "task":
            parts.append(f"{key} unknown" if pd.isna(row[key]) else f"{key} {row[key]}")
    return ", ".join(parts)


def _series(group: pd.DataFrame) -> tuple[Series, ...]:
    order = {kind: place for place, kind in enumerate(ATTENTION_STYLES)}
    rows = sorted(group.to_dict("records"), key=lambda row: order.get(row["attention"], len(order)))
    paths, kinds = ([str(row[name]) for row in rows] for name in ("model", "attention"))
    ks = [None if pd.isna(row["k"]) else int(row["k"]) for row in rows]
    labels = [attention_label(row["attention"], k, row["global_tokens"]) for row, k in zip(rows, ks, strict=True)]
    return tuple(
        Series(
            path, kind, k, label if labels.count(label) == 1 else f"{label} {path_tail(path, paths)}",
            _apart(attention_style(kind), kinds[:i].count(kind), kinds.count(kind)),
        )
        for i, (path, kind, k, label) in enumerate(zip(paths, kinds, ks, labels, strict=True))
    )  # fmt: skip


def _apart(style: AttentionStyle, place: int, count: int) -> AttentionStyle:
    if not place:
        return style
    markers = [style.marker, *(marker for marker in _MARKERS if marker != style.marker)]
    color = to_hex(lightened(style.color, _LIGHTEST * place / (count - 1)))
    return replace(style, color=color, marker=markers[place % len(markers)])


# (lower percentile, upper percentile, share of the full width, share of white), drawn from the outside in.
_BOXES = (("p1", "p99", 0.25, 0.75), ("p5", "p95", 0.5, 0.55), ("p10", "p90", 0.75, 0.3), ("p25", "p75", 1.0, 0.0))
_DISTINCT = 0.06  # inches of a box; of a narrower one colour alone tells the parts
READING = "boxes from the inside out: 25–75, 10–90, 5–95, 1–99% of the queries; line: median"


def _draw_letter_values(
    ax: Axes, x: float, width: float, table: Mapping[Hashable, float], style: AttentionStyle, narrow: bool
) -> None:
    """Draw the percentiles of one set of queries as nested boxes, its median and the largest."""
    if not np.isfinite(table["p50"]):
        return
    floor = ax.get_ylim()[0]
    logarithmic = ax.get_yscale() == "log"
    for low, high, share, white in _BOXES:
        bottom = table[low]
        top = table[high]
        if logarithmic:
            bottom = max(bottom, floor)
            top = max(top, floor)
        if top > bottom or not logarithmic:
            broad = width if narrow else width * share
            box = Rectangle((x - broad / 2, bottom), broad, top - bottom)
            box.set(facecolor=lightened(style.color, white), edgecolor="white", linewidth=0.3)
            ax.add_patch(box)
    if table["p50"] > floor:
        ends = [x - width / 2, x + width / 2]
        ax.plot(ends, [table["p50"]] * 2, color="white", linewidth=1.4, solid_capstyle="butt")
    if table["p100"] > floor:
        ax.plot(
            x, table["p100"], marker=style.marker, color=style.color, markersize=3.0 if narrow else 4.2,
            markeredgecolor="white", markeredgewidth=0.5, linestyle="none", zorder=4,
        )  # fmt: skip


def layer_boxes(ax: Axes, boxes: Sequence[tuple[str, AttentionStyle, pd.DataFrame]]) -> None:
    """Draw one group of boxes per layer, one box of each table, and number the layers from 0."""
    layers = sorted({int(layer) for _, _, table in boxes for layer in table["layer"]})
    width = 0.84 / max(len(boxes), 1)
    narrow = width * panel_inches(ax) / max(len(layers), 1) < _DISTINCT
    for place, (label, style, table) in enumerate(boxes):
        ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", markersize=6, label=label)
        for row in table.to_dict("records"):
            x = row["layer"] + (place - (len(boxes) - 1) / 2) * width
            _draw_letter_values(ax, x, 0.85 * width, row, style, narrow)
    number_layers(ax, layers)
    ax.set_xlim(min(layers, default=0) - 0.6, max(layers, default=0) + 0.6)


def layers_span(symbol: str, tables: Iterable[pd.DataFrame]) -> str:
    """Return in words between which layers' medians a quantity in nats lies."""
    rows = pd.concat(tables, ignore_index=True)
    medians = rows["p50"][np.isfinite(rows["p50"])]
    layers = rows["layer"]
    if medians.empty:
        return f"{symbol} undefined"
    low = medians.idxmin()
    high = medians.idxmax()
    most = f" to {number(medians[high], 2)} in layer {layers[high]}" if low != high else ""
    return f"median {symbol} of {number(medians[low], 2)} nats in layer {layers[low]}{most}"


def kinds_of(series: Sequence[Series]) -> list[str]:
    """Return the kinds of attention of a panel's models, with their k where one kind has several models."""
    names = [each.style.name for each in series]
    return [each.label if names.count(name) > 1 else name for each, name in zip(series, names, strict=True)]


def layers_with(series: Sequence[Series], holds: Sequence["pd.Series[bool]"]) -> str:
    """Return in how many layers something holds of each model, like ``4 of 5 layers with top-k``."""
    counts = [f"{flags.sum()} of {len(flags)}" for flags in holds]
    parts = [f"{count} with {kind}" for count, kind in zip(counts, kinds_of(series), strict=True)]
    return ", ".join(parts).replace(" with", " layers with", 1)


def logarithmic_limits(ax: Axes, low: float, high: float) -> None:
    """Set a logarithmic y axis with some room at both ends."""
    ax.set_yscale("log")
    ax.set_ylim(low / 1.3, high * 1.5)
    plain_numbers(ax.yaxis)


def positive_range(tables: pd.DataFrame, low: str, high: str) -> tuple[float, float]:
    """Return the smallest and the largest positive percentile, for a logarithmic axis."""
    columns = dict.fromkeys((low, "p5", "p25", "p50", "p95", high)) if len(tables) else ()
    values = [tables[column].to_numpy(float) for column in columns]
    positive = [each[np.isfinite(each) & (each > 0)] for each in values]
    if not positive or not positive[-1].size:
        raise NothingToDrawError(
            "No query has a finite value above 0, so there is nothing to show on a logarithmic axis."
        )
    return float(next(each for each in positive if each.size).min()), float(positive[-1].max())


_DARK = 0.55  # share of the scale, above which a cell's text is white


# Of dark pages, where the lightest cell is the largest.
_ON_DARK = LinearSegmentedColormap.from_list("blues on dark", ["#1c2530", "#1f5f99", "#6cb4f0", "#e3f2ff"])
_SCALE_STEPS = np.linspace(1, 0, 256)[:, np.newaxis]  # of a colour bar, from above


class _GroupedImage(AxesImage):
    """An image in a group of its own, which style sheets of an SVG can show or hide by its id."""

    def draw(self, renderer: RendererBase) -> None:
        """Draw the image inside its group."""
        renderer.open_group("image", gid=self.get_gid())
        super().draw(renderer)
        renderer.close_group("image")


def _draw_cells(
    ax: Axes, cells: np.ndarray, scale: Normalize, name: str, extent: tuple[float, float, float, float]
) -> AxesImage:
    """Draw cells for dark pages, and over them for light ones; return these."""
    for colours, page in ((_ON_DARK, DARK_MAP), (colormaps["Blues"], LIGHT_MAP)):
        image = _GroupedImage(ax, cmap=colours, norm=scale, interpolation="none", extent=extent, origin="upper")
        image.set_data(cells)
        image.set_gid(f"{page}-{name}")
        ax.add_image(image)
    return image


def heat_map(ax: Axes, cells: np.ndarray, scale: Normalize, text: Callable[[float], str] | None = None) -> None:
    """Draw cells in one hue, hatched where they are not finite, with a colour bar."""
    number_of_map = len(ax.figure.axes)
    rows, columns = cells.shape
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    image = _draw_cells(ax, cells, scale, f"{number_of_map}-cells", extent)
    ax.set(aspect="auto", xlim=extent[:2], ylim=extent[2:])
    ax.patch.set(facecolor="#f2f2f2", edgecolor="#bbbbbb", hatch="////")  # seen where nothing was measured
    ax.grid(visible=False)
    for (row, column), value in np.ndenumerate(cells) if text else ():
        if text and np.isfinite(value):
            deep = scale(max(value, scale.vmin or 0)) > _DARK
            kind, color = (DEEP_CELL, "white") if deep else (PALE_CELL, "black")
            ax.text(
                column, row, text(value), ha="center", va="center", fontsize=9, color=color,
                gid=f"{kind}-{number_of_map}-{row}-{column}",
            )  # fmt: skip
    bar = ax.figure.colorbar(image, ax=ax, pad=0.01, aspect=12)
    for shades in bar.ax.collections:
        shades.set_visible(False)
    _draw_cells(bar.ax, _SCALE_STEPS, Normalize(0, 1), f"{number_of_map}-bar", (0, 1, 0, 1))
    for each in bar.ax.images:
        each.set_transform(bar.ax.transAxes)
    bar.ax.tick_params(labelsize=9)
    plain_numbers(bar.ax.yaxis)


def name_cells(axis: Axis, names: Sequence[object], most: int = 12) -> None:
    """Name the rows or columns of cells, every second, third … of them where there are more than ``most``."""
    step = -(-len(names) // most)
    axis.set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])


# Quantity, whether each layer shows its largest or its smallest head, and the title.
_PANELS = (
    ("max_logit", "max", "largest score of any head (nats)"),
    ("entropy", "min", "smallest mean entropy of any head (nats)"),
    ("first_weight", "max", "largest mean weight on the first key"),
    ("dispersion", "max", "largest median dispersion δ (nats)"),
)
_ALARM = "#d55e00"
_FAR = 30  # ratio of largest to smallest value above which colours are logarithmic


@paper_style
def monitored_run(rows: pd.DataFrame) -> Figure:
    """Draw heat maps of layers against steps, with the first alarm of each layer and its head marked."""
    if rows.empty:
        raise NothingToDrawError("The file has no rows: no step was looked at.")
    pairs = zip(rows["layer"].tolist(), rows["occurrence"].astype(int).tolist(), strict=True)
    rows = rows.assign(place=pd.Series([*pairs], index=rows.index, dtype=object))
    steps = sorted(rows["step"].unique())
    places = sorted(rows["place"].unique())
    panels = [*_PANELS, *_further_panels(rows)]
    figure, axes = panel_grid(len(panels), height=0.9 + 0.16 * len(places), sharey=False, columns=2)
    marked = False
    for ax, (name, extreme, title) in zip(axes, panels, strict=True):
        alarmed = rows[rows["alarm"].str.contains(rf"\b{name}:")]
        cells = rows.groupby(["place", "step"])[name].agg(extreme)
        cells.update(alarmed.groupby(["place", "step"])[name].agg(extreme))
        _draw(ax, cells.unstack("step").reindex(index=places, columns=steps).to_numpy(float))
        name_cells(ax.xaxis, steps, 6)
        name_cells(ax.yaxis, [f"{layer}.{call}" if call else str(layer) for layer, call in places])
        ax.set_xlabel("step")
        ax.set_ylabel("layer")
        ax.set_title(title, fontsize=9)
        if len(alarmed):
            _mark_first_alarms(ax, alarmed, steps, places)
            marked = True
    note = "A cell is the head of a layer that is furthest out. Hatched: no finite value."
    if marked:
        note += " Where a head alarms, the cell is that head. Crosses: the first alarm of a layer."
    note_below(figure, note)
    return figure


def _further_panels(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Return a panel for each quantity that alarmed and is not always shown."""
    alarms = {alarm.partition(":")[0] for text in rows["alarm"].unique() for alarm in text.split()}
    panels = []
    for name in sorted(alarms - {name for name, *_ in _PANELS}):
        named_metric = metric_of(name)
        if named_metric is None:
            continue
        metric, k = named_metric
        extreme = "min" if metric.by_head == "min" else "max"
        label = metric.label if k is None else f"{metric.label} at k = {k}"
        unit = f" ({metric.unit})" if metric.unit else ""
        size = "smallest" if extreme == "min" else "largest"
        panels.append((name, extreme, f"{size} {label} of any head{unit}"))
    return panels


def _mark_first_alarms(
    ax: Axes, alarmed: pd.DataFrame, steps: Sequence[int], places: Sequence[tuple[int, int]]
) -> None:
    """Mark where each layer first alarms, and name the head."""
    first = alarmed[alarmed["step"] == alarmed.groupby("place")["step"].transform("min")]
    columns = []
    lines = []
    for place, group in first.groupby("place"):
        heads = sorted(group["head"].unique())
        column = steps.index(group["step"].iloc[0])
        line = places.index(place)
        columns.append(column)
        lines.append(line)
        right = column < len(steps) / 2
        ax.annotate(
            f"head {heads[0]}" if len(heads) == 1 else f"head {heads[0]}, +{len(heads) - 1}",
            (column, line),
            xytext=(6 if right else -6, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=9,
            color=_ALARM,
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
        )
    ax.plot(columns, lines, linestyle="none", marker="x", color=_ALARM, markersize=6, markeredgewidth=2)


def _draw(ax: Axes, cells: np.ndarray) -> None:
    finite = cells[np.isfinite(cells)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    far = low > 0 and high > _FAR * low
    scale = LogNorm(low, high) if far else Normalize(min(0.0, low), high if high > min(0.0, low) else 1.0)
    heat_map(ax, np.where(np.isfinite(cells), cells, np.nan), scale)


POINTS = 500


def cumulative_curve(values: ArrayLike, points: int = POINTS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points of the cumulative distribution of the finite values above 0, exact at evenly spaced shares."""
    array = np.asarray(values, dtype=np.float64).ravel()
    array = array[np.isfinite(array)]
    if not array.size:
        return np.zeros(0), np.zeros(0)
    shares = np.linspace(0.0, 1.0, min(points, max(array.size, 2)))
    cuts = np.quantile(array, shares)
    return cuts[cuts > 0], shares[cuts > 0]


def exceedance_curve(counts: ArrayLike, points: int = POINTS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the share of counts that are at least x, for every x that occurs."""
    array = np.asarray(counts, dtype=np.float64).ravel()
    distinct, repeats = np.unique(array[np.isfinite(array)], return_counts=True)
    if not distinct.size:
        return np.zeros(0), np.zeros(0)
    at_least = repeats[::-1].cumsum()[::-1] / repeats.sum()
    if distinct.size > points:
        chosen = np.unique(np.linspace(0, distinct.size - 1, points).round().astype(int))
        distinct = distinct[chosen]
        at_least = at_least[chosen]
    return distinct, at_least


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def factors(low: float, high: float) -> str:
    """Return the range of several factors: powers of ten, or plain numbers below a thousand."""
    ends = [
        "10" + str(round(end)).translate(_SUPERSCRIPT) if high >= 3 else f"{float(f'{10**end:.2g}'):g}"
        for end in (low, high)
    ]
    return f"about {ends[0]}" if ends[0] == ends[1] else " to ".join(ends)


_APART = 0.075  # of a panel's height, between two names


def name_ends(ax: Axes, ends: Sequence[tuple[float, str, str, str]]) -> None:
    """Write names beside the ends of lines, apart from each other; an end is (height, name, colour, gid)."""
    ends = sorted(ends)
    to_share = ax.transData - ax.transAxes
    places = [float(to_share.transform((ax.get_xlim()[1], y))[1]) for y, *_ in ends]
    for at in range(1, len(places)):
        places[at] = max(places[at], places[at - 1] + _APART)
    for at in reversed(range(len(places))):
        places[at] = min(places[at], (places[at + 1] if at + 1 < len(places) else 1 + _APART) - _APART)
    for (_, name, color, gid), place in zip(ends, places, strict=True):
        label = ax.annotate(
            name, (1, place), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points", va="center",
            color=color, fontweight="bold", fontsize=9, annotation_clip=False,
        )  # fmt: skip
        label.set_gid(gid or None)
