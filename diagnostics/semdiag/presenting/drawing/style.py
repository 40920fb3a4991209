"""The common style of all figures: colours, markers and lines per attention kind, fonts, grids of panels."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, update_wrapper, wraps
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from semdiag.measuring.findings.findings import Findings
from semdiag_files import InputError, visible

P = ParamSpec("P")
R = TypeVar("R")

# Seaborn's colour-blind palette, written out, because importing seaborn takes a second.
_COLORBLIND = (
    "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9",
)  # fmt: skip
_AMBER, _BROWN, _ROSE, _GREY, _YELLOW, _SKY = (_COLORBLIND[i] for i in (1, 5, 6, 7, 8, 9))
# Text in these has a contrast of 4.5 : 1 on white.
_FULL = "#3d3d3d"
_TOPK = "#c2570c"
_SHARED = "#0b66b3"
_WINDOW = "#00795a"
_BLOCKS = "#7b4f9e"
_RANDOM = "#767676"
INK = "#222222"
FAINT = "#6b6b6b"
_GRID = "#e4e4e4"
_SMALL = 9.0  # points: 12 pixels of a page
_LETTERS_PER_INCH = 17.5  # of 7-point text
_FEW_LETTERS = 8  # of the numbers beside an axis: names take room of their own
_LAYER_INCHES = 0.3  # for a number of two digits and room beside it

PAPER: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs on every machine
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "legend.fontsize": _SMALL,
    "xtick.labelsize": _SMALL,
    "ytick.labelsize": _SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud and recoloured
    "svg.hashsalt": "semdiag",  # otherwise the identifiers inside an SVG are random
    "pdf.fonttype": 42,  # text stays text, as journals ask
}


@dataclass(frozen=True)
class AttentionStyle:
    """The style of one kind of attention in every figure; marker and line also distinguish it in grey."""

    name: str  # in words
    color: str  # safe for colour-blind readers
    marker: str  # shape of the points
    line: str | tuple[int, tuple[int, ...]]  # line style
    width: float  # line width in points; input-agnostic controls are thinner


# The one place that fixes colour and name of each kind: of trained attention, and of masks put into a model.
ATTENTION_STYLES = {
    "full": AttentionStyle("full", _FULL, "o", "-", 1.9),
    "topk": AttentionStyle("top-k", _TOPK, "s", (0, (6, 1)), 1.9),
    "banded": AttentionStyle("banded", _WINDOW, "^", (0, (3, 1, 1, 1)), 1.1),
    "block": AttentionStyle("local blocks", _BLOCKS, "D", (0, (1, 1)), 1.1),
    "bottomk": AttentionStyle("bottom-k", _BROWN, "v", (0, (4, 2)), 1.1),
    "random": AttentionStyle("random-k", _RANDOM, "P", (0, (2, 2)), 1.1),
    "redrawn": AttentionStyle("redrawn-k", _YELLOW, "p", (0, (1, 3)), 1.1),
    "lsh": AttentionStyle("LSH", _SKY, "*", (0, (8, 1, 1, 1)), 1.9),
    "routing": AttentionStyle("routing", _ROSE, "h", (0, (5, 1, 1, 1, 1, 1)), 1.9),
    "indexer": AttentionStyle("indexer", _SHARED, "X", (0, (7, 2)), 1.9),
    "moba": AttentionStyle("MoBA", _AMBER, "H", (0, (3, 1)), 1.9),
}
MASK_STYLES = {
    "topk": AttentionStyle("top-k by head", _TOPK, "o", "-", 1.9),
    "topk-group": AttentionStyle("top-k by key head", _SHARED, "v", (0, (4, 1)), 1.9),
    "topk-layer": AttentionStyle("top-k by layer", _SHARED, "o", "-", 1.9),
    "topk-4-layers": AttentionStyle("top-k by 4 layers", _SHARED, "^", (0, (1, 1)), 1.9),
    "block-16": AttentionStyle("blocks of 16", _BLOCKS, "o", "-", 1.9),
    "block-32": AttentionStyle("blocks of 32", _BLOCKS, "v", (0, (4, 1)), 1.9),
    "block-64": AttentionStyle("blocks of 64", _BLOCKS, "^", (0, (1, 1)), 1.9),
    "window": AttentionStyle("nearest + first 4", _WINDOW, "o", "-", 1.9),
    "topp": AttentionStyle("top-p by head", _BROWN, "o", "-", 1.9),
    "random": AttentionStyle("random (control)", _RANDOM, "o", (0, (4, 2)), 1.6),
}

# For external models, which never share a panel: like full attention except for the mask.
DENSE_STYLES = {
    "causal": AttentionStyle("causal", _FULL, "<", "-", 1.9),
    "masked": AttentionStyle("masked", _FULL, "H", "-", 1.9),
}


def attention_style(kind: str) -> AttentionStyle:
    """Return the fixed style of an attention kind; a grey one for a kind without."""
    return (ATTENTION_STYLES | DENSE_STYLES).get(kind, AttentionStyle(kind, _GREY, "d", (0, (5, 2)), 1.1))


def mask_style(kind: str) -> AttentionStyle:
    """Return the fixed style of a kind of masks; a brown one for a kind without."""
    return MASK_STYLES.get(kind, AttentionStyle(kind, _BROWN, "X", (0, (3, 1)), 1.9))


def palette(count: int) -> list[str]:
    """Return distinct colours that are safe for colour-blind readers; the eleventh repeats the first."""
    return [_COLORBLIND[i % len(_COLORBLIND)] for i in range(count)]


def lightened(color: str, share: float) -> tuple[float, float, float]:
    """Mix a colour with white."""
    red, green, blue = (value + (1 - value) * share for value in to_rgb(color))
    return red, green, blue


def paper_style(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a function with the settings of :data:`PAPER`, and restore the user's own afterwards."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(PAPER):
            return draw(*args, **kwargs)

    return styled


class Drawing:
    """A figure of a question: drawn from findings, and described for readers."""

    __name__: str  # also of its files

    def __init__(self, draw: Callable[[Findings], Figure], alt: str, reading: str) -> None:
        self._draw = paper_style(draw)
        self.alt = alt  # for readers who cannot see it; ``{shown}`` becomes its legend and panel titles
        self.reading = reading  # two sentences: what to look at, and what it means
        update_wrapper(self, draw)
        self.name = self.__name__

    def __call__(self, findings: Findings) -> Figure:
        """Return the figure, drawn in the common style."""
        return self._draw(findings)


def drawing(alt: str, reading: str) -> Callable[[Callable[[Findings], Figure]], Drawing]:
    """Turn a function into a figure of a question: what it shows, and how it is read."""
    return lambda draw: Drawing(draw, alt, reading)


class PageFigure(Figure):
    """A figure that a notebook shows without pyplot."""

    finding = ""  # in a sentence; empty if the figure does not know it

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.tooltips: dict[str, str] = {}  # in words what a part of the picture shows, by its gid

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=110)
        return file.getvalue()


_STACKED: ContextVar[bool] = ContextVar("stacked", default=False)


@contextmanager
def stacked() -> Iterator[None]:
    """Draw figures for telephones inside: narrow, with panels stacked."""
    token = _STACKED.set(True)
    try:
        yield
    finally:
        _STACKED.reset(token)


def page_width() -> float:
    """Return the width of a figure in inches: the page's text, or a telephone."""
    return 3.75 if _STACKED.get() else 10.0


def panel_inches(ax: Axes) -> float:
    """Return roughly the width of a panel in inches, without its labels."""
    place = ax.get_subplotspec()
    columns = 1 if place is None else place.get_gridspec().ncols
    labels = [label.get_text() for each in ax.figure.axes for label in each.get_yticklabels()]
    letters = max((len(text) for text in labels if "$" not in text), default=0)  # powers of ten are short
    room = page_width() - max(0, letters - _FEW_LETTERS) * 9 / 7 / _LETTERS_PER_INCH
    return room / columns - (1.0 if _STACKED.get() else 0.55)


def wrapped(ax: Axes, text: str, size: float = 9.0) -> str:
    """Return a text broken into lines that fit a panel."""
    letters = max(12, int(_LETTERS_PER_INCH * 7.0 / size * panel_inches(ax)))
    return "\n".join(piece for line in text.splitlines() for piece in textwrap.wrap(line, letters))


def panel_grid(
    panels: int, height: float = 2.7, *, sharex: bool = False, sharey: bool = True, columns: int | None = None
) -> tuple[PageFigure, list[Axes]]:
    """Return a figure with a number of panels, outside pyplot's global state."""
    columns = columns or (panels if panels <= 3 else 2 if panels == 4 else 3)
    height *= 1.3 if panels == 1 else 1.1 if columns == 2 else 1.0
    columns = 1 if _STACKED.get() else columns
    rows = math.ceil(panels / columns)
    figure = PageFigure(figsize=(page_width(), rows * height + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    axes = list(grid.ravel())
    for spare in axes[panels:]:
        spare.set_visible(False)
    for above in axes[panels - columns : panels] if sharex else []:
        above.tick_params(labelbottom=True)
    for ax in axes[:panels]:
        ax.grid(axis="y")
        ax.tick_params(labelsize=_SMALL, color=INK)
    return figure, axes[:panels]


def finished(figure: Figure, note: str) -> Figure:
    """Finish a figure: one legend above all panels, with each label once, and a note below on the marks."""
    panels = figure.axes
    entries = {
        label: handle for ax in panels for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    if len(entries) > 1:  # a single one says nothing that the title does not
        inches = 0.65 + max(len(label) for label in entries) / 17
        rows = math.ceil(len(entries) / max(1, int(figure.get_figwidth() / inches)))
        columns = math.ceil(len(entries) / rows)
        figure.legend(
            entries.values(), entries.keys(), loc="outside upper center", ncols=columns, handlelength=2.4,
            columnspacing=1.4, handletextpad=0.5,
        )  # fmt: skip
    note_below(figure, note)
    return figure


def note_below(figure: Figure, text: str) -> None:
    """Add a note below the panels that explains the marks, and break titles that are too wide."""
    for ax in figure.axes:
        title = ax.get_title(loc="left")
        for part in ax.get_children() if title else ():
            if isinstance(part, Text) and part.get_text() == title:
                part.set_text(wrapped(ax, title, float(part.get_fontsize())))
    letters = int(_LETTERS_PER_INCH * 7 / 9 * figure.get_figwidth())
    lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, letters)]
    figure.supxlabel("\n".join(lines), fontsize=9, color=FAINT)


def title_with_facts(ax: Axes, title: str, facts: Sequence[str]) -> None:
    """Title a panel, with statements in small print between title and axes."""
    lines = wrapped(ax, "\n".join(facts))
    ax.set_title(title, pad=11.8 * (lines.count("\n") + 1) + 6 if lines else 6)
    ax.text(0.0, 1.01, lines, transform=ax.transAxes, fontsize=9, linespacing=1.2, va="bottom")


def number_layers(ax: Axes, layers: Sequence[int]) -> None:
    """Label the layers on the axis of abscissae, as many of them as have room."""
    step = max(1, math.ceil(len(layers) * _LAYER_INCHES / panel_inches(ax)))
    ax.set_xticks(layers[::step], [str(int(layer)) for layer in layers[::step]])
    ax.set_xlabel("layer")


def plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis 0.1, 1, 10 instead of with powers of ten."""

    def between(value: float, _: int | None) -> str:
        low, high = np.log10(np.clip(sorted(axis.get_view_interval()), 1e-300, None))
        if high - low < np.log10(3):
            return f"{value:g}"
        labelled = np.floor(high) - np.ceil(low) >= 2 or f"{value:e}"[0] not in "25"
        return "" if labelled else f"{value:g}"

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(between))


def decades(ax: Axes) -> float:
    """Return the powers of ten that the positive values of a panel's lines span."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in ax.lines])
    values = values[np.isfinite(values) & (values > 0)]
    return float(np.log10(values.max() / values.min())) if len(values) else 0.0


# Fields that would otherwise contain the date or a version.
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_PNG_DPI = 150


@paper_style
def save_figure(figure: Figure, path: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write a figure in several formats; control characters in its texts become their escapes."""
    unknown = [name for name in formats if name not in _METADATA]
    if unknown:
        raise InputError(f"Figures are written as {', '.join(_METADATA)}. Got {unknown[0]}.")
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_text() != (shown := visible(text.get_text())):
            text.set_text(shown)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.parent / f"{path.name}.{name}" for name in formats]
    canvas = figure.canvas
    layout = figure.get_layout_engine()
    dpi = figure.get_dpi()
    figure.set_dpi(_PNG_DPI)
    try:
        for name, file in zip(formats, files, strict=True):
            # Use the format's canvas directly: Figure.savefig draws everything twice, with a layout each time.
            getattr(get_registered_canvas_class(name)(figure), f"print_{name}")(file, metadata=_METADATA[name])
            figure.set_layout_engine("none")
            if name == "svg":  # tick labels are created while drawing, and are in it as comments
                svg = visible(file.read_text(encoding="utf-8"))
                svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")  # of the same widths
                light = f'[id^="{DARK_MAP}"]{{display:none}}'
                dark = f"<style>{light}@media screen and (prefers-color-scheme:dark){{{_RULES}}}</style>"
                file.write_text(svg.replace("<defs>", f"{dark}<defs>", 1), encoding="utf-8", newline="\n")
    finally:
        figure.set_canvas(canvas)
        figure.set_layout_engine(layout)
        figure.set_dpi(dpi)
    return files


# How ids of groups begin: maps of light and of dark pages, one over the other, and numbers in their cells.
LIGHT_MAP = "light-map"
DARK_MAP = "dark-map"
DEEP_CELL = "deep-cell"
PALE_CELL = "pale-cell"

# In dark mode these become: the ground, inks, grid and hatches, and the kinds' colours, of which text is legible.
_DARK = {
    "#ffffff": "#17191b", INK: "#e7e8ea", FAINT: "#a4abb2", "#000000": "#e7e8ea", _GRID: "#33373b",
    _FULL: "#d0d3d6", _TOPK: "#f08a3c", _SHARED: "#6cb4f0", _WINDOW: "#4cc79a", _BLOCKS: "#bd95de",
    _RANDOM: "#9aa0a6", "#f2f2f2": "#1f2225", "#bbbbbb": "#4a4f54",
}  # fmt: skip
_RULES = (
    "".join(
        f'{tag}[style*="{of}: {light}"]{{{of}:{dark}!important}}'
        for light, dark in _DARK.items()
        for tag in ("path", "use", "text", "tspan")
        for of in (("fill",) if tag.startswith("t") else ("fill", "stroke"))
        if light != ("#ffffff" if tag.startswith("t") else "#000000")  # white text lies on dark cells
    )
    + f'rect[fill="#f2f2f2"]{{fill:{_DARK["#f2f2f2"]}}}'
    + f'[id^="{LIGHT_MAP}"]{{display:none}}[id^="{DARK_MAP}"]{{display:inline}}'
    + f'[id^="{DEEP_CELL}"] text{{fill:#17191b!important}}[id^="{PALE_CELL}"] text{{fill:#ffffff!important}}'
)


_BAND = "#8a8f94"
_MODELS = "MiniLM", "SmolLM2"  # trained on language, unlike the small reference encoders


class Range(NamedTuple):
    """The 5th to 95th percentile, over a model's heads, of each head's median over queries."""

    model: str
    tokens: int  # of its longest text
    low: float
    high: float


@cache
def reference_ranges(quantity: str) -> tuple[Range, ...]:
    """Return the ranges of trained language models."""
    with files("semdiag.presenting.drawing").joinpath("reference_ranges.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file)
    rows = table[(table["quantity"] == quantity) & table["model"].isin(_MODELS)].to_dict("records")
    return tuple(Range(str(row["model"]), int(row["tokens"]), float(row["p5"]), float(row["p95"])) for row in rows)


def other_ranges(quantity: str, models: Iterable[str]) -> list[Range]:
    """Return the ranges of trained language models that are not among the measured ones, by their names."""
    names = [model.lower() for model in models]
    return [each for each in reference_ranges(quantity) if not any(each.model.lower() in name for name in names)]


def draw_band(ax: Axes, quantity: str, models: Iterable[str]) -> None:
    """Shade the range of other models behind a panel."""
    if ranges := other_ranges(quantity, models):
        low = min(each.low for each in ranges)
        high = max(each.high for each in ranges)
        label = f"heads of {' and '.join(f'{each.model} ({each.tokens:,} tokens)' for each in ranges)}"
        ax.axhspan(low, high, color=_BAND, alpha=0.16, linewidth=0, zorder=0, label=label)


def reference_words(quantity: str, models: Iterable[str]) -> str:
    """Return the ranges of other models in words, like ``11–26 (SmolLM2, 2,048 tokens)``."""
    return ", ".join(
        f"{each.low:g}–{each.high:g} ({each.model}, {each.tokens:,} tokens)"
        for each in other_ranges(quantity, models)
    )
