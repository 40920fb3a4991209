"""One sample's selections as a map: the keys, or experts, that each token keeps, could keep, and may not."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import finished, palette, panel_grid, paper_style
from semdiag.questions.selections.compare import LARGEST, SampleMap

_PANELS = 12  # more are not drawn
_COLOURS = ("#e4e4e4", "#f3cf9d", palette(1)[0])  # in the order of the states
_LABELS = ("forbidden", "available, left out", "chosen")


@paper_style
def selection_maps(maps: Sequence[SampleMap]) -> Figure:
    """Draw what each selection of a model did with one sample."""
    maps = [each for each in maps if each.states.size]
    if not maps:
        raise NothingToDrawError("The first sample has no token that selects.")
    shown = maps[:_PANELS]
    figure, axes = panel_grid(len(shown), height=3.0, sharey=False)
    for ax, each in zip(axes, shown, strict=True):
        _draw(ax, each)
    more = f" The first {len(shown)} of {len(maps)} selections." if len(maps) > len(shown) else ""
    cut = f" The first {LARGEST} tokens." if any(each.cut for each in shown) else ""
    note = (
        "The first sample, without padding. A row is a token: what it chose, what it could have chosen instead, "
        f"and what a mask forbids or lies in a group of experts that was not chosen.{cut}{more}"
    )
    return finished(figure, note)


def _draw(ax: Axes, shown: SampleMap) -> None:
    ax.imshow(shown.states, cmap=ListedColormap(_COLOURS), vmin=0, vmax=2, aspect="auto", interpolation="none")
    ax.grid(visible=False)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_title(shown.module, fontsize=9)
    ax.set_xlabel({"experts": "expert", "blocks": "block"}.get(shown.kind, "key"))
    ax.set_ylabel("token" if shown.kind == "experts" else "query")
    for label, colour in reversed([*zip(_LABELS, _COLOURS, strict=True)]):
        ax.scatter([], [], marker="s", s=60, color=colour, label=label)
