"""Group models into panels: only models that differ in nothing but attention share one."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.colors import to_hex

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.findings.pairing import RUN_AND_SNAPSHOT, path_tail
from semdiag.presenting.drawing.style import ATTENTION_STYLES, AttentionStyle, attention_style, lightened

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
    length: int  # tokens of the longest input
    label: str  # for the legend
    style: AttentionStyle  # colour, marker, line


@dataclass(frozen=True)
class Panel:
    """Models of the same task, seed, size, setting and snapshot."""

    title: str  # common properties in which other panels differ
    series: tuple[Series, ...]  # one entry per model, full attention first
    snapshot: str = ""  # ``last``, ``initialisation``, … ; empty if snapshots do not matter


def panels_of(models: pd.DataFrame, keys: Sequence[str] = RUN_AND_SNAPSHOT) -> list[Panel]:
    """Group models into panels, last snapshots before all others."""
    if models.empty:
        raise NothingToDrawError("No model was measured.")
    foreign = external(models)
    differing = [key for key in keys if models[~foreign][key].nunique(dropna=False) > 1]
    own_panel = models["model"].where(foreign, "")  # external models have nothing known in common
    panels = []
    for _, group in models.groupby([*keys, own_panel.rename("_own")], dropna=False, sort=False):
        snapshot = str(group["snapshot"].iloc[0]) if "snapshot" in keys else ""
        name = str(own_panel[group.index[0]])
        title = path_tail(name, models["model"]) if name else _title(group.iloc[0].to_dict(), differing)
        panels.append(Panel(title, _series(group), snapshot))
    return sorted(panels, key=lambda panel: panel.snapshot not in ("last", ""))


def model_labels(models: pd.DataFrame, *, last_only: bool = False) -> dict[str, str]:
    """Return each model in words, like ``even-pairs, top-k (k = 5)``."""
    panels = panels_of(models)
    last = [panel for panel in panels if panel.snapshot in ("last", "")]
    shown = last if last_only and last else panels
    return {s.model: f"{panel.title}, {s.label}" for panel in shown for s in panel.series}


def short_labels(models: pd.DataFrame) -> dict[str, str]:
    """Return each model in few words, for ticks: what distinguishes it from the others."""
    whole = model_labels(models)
    tasks = dict(zip(models["model"], models["task"], strict=True)) if models["task"].nunique() > 1 else {}
    labels = {s.model: s.label for panel in panels_of(models) for s in panel.series}
    short = {model: f"{tasks[model]}, {label}" if model in tasks else label for model, label in labels.items()}
    all_labels = list(short.values())
    return {model: label if all_labels.count(label) == 1 else whole[model] for model, label in short.items()}


def attention_label(kind: str, k: int | None, global_tokens: int = 0) -> str:
    """Return an attention's name for a legend, like ``top-k (k = 5)`` or ``banded (k = 5 + 1 global)``."""
    name = attention_style(kind).name
    more = f" + {global_tokens} global" if global_tokens else ""
    return name if k is None or kind == "full" else f"{name} (k = {k}{more})"


def _title(row: dict[Hashable, Any], differing: list[str]) -> str:
    parts = ["task unknown" if pd.isna(row["task"]) else str(row["task"])]
    for key in differing:
        if key == "snapshot":
            parts.append(_SNAPSHOT_NAMES.get(str(row[key]), f"{row[key]} snapshot"))
        elif key != "task":
            parts.append(f"{key} unknown" if pd.isna(row[key]) else f"{key} {row[key]}")
    return ", ".join(parts)


def _series(group: pd.DataFrame) -> tuple[Series, ...]:
    order = {kind: place for place, kind in enumerate(ATTENTION_STYLES)}
    rows = sorted(group.to_dict("records"), key=lambda row: order.get(row["attention"], len(order)))
    paths = [str(row["model"]) for row in rows]
    ks = [None if pd.isna(row["k"]) else int(row["k"]) for row in rows]
    labels = [attention_label(row["attention"], k, row["global_tokens"]) for row, k in zip(rows, ks, strict=True)]
    kinds = [row["attention"] for row in rows]
    styles = [
        _apart(attention_style(kind), kinds[:i].count(kind), kinds.count(kind)) for i, kind in enumerate(kinds)
    ]
    return tuple(
        Series(
            model=str(row["model"]),
            attention=row["attention"],
            k=k,
            length=int(row["length"]),
            label=label if labels.count(label) == 1 else f"{label} {path_tail(str(row['model']), paths)}",
            style=style,
        )
        for row, k, label, style in zip(rows, ks, labels, styles, strict=True)
    )


def _apart(style: AttentionStyle, place: int, count: int) -> AttentionStyle:
    """Return distinct styles for models with the same attention: lighter, with another marker."""
    if not place:
        return style
    markers = [style.marker, *(other for other in _MARKERS if other != style.marker)]
    color = to_hex(lightened(style.color, _LIGHTEST * place / (count - 1)))
    return replace(style, color=color, marker=markers[place % len(markers)])
