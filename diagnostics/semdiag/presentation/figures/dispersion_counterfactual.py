"""Within one full-attention model: what its dispersion would be over its k largest scores only."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measurement.measurements import Measurements
from semdiag.measurement.percentiles import pooled_table
from semdiag.presentation.figures.dispersion_by_layer import label_layers, positive_range
from semdiag.presentation.letter_values import READING, draw_letter_values, legend_entry, logarithmic_limits
from semdiag.presentation.panels import NothingToDrawError, Panel, panels_of
from semdiag.presentation.style import (
    AttentionStyle,
    attention_style,
    legend_on_top,
    lightened,
    note_below,
    panel_grid,
    paper_style,
)

_PREFIX = "dispersion_k"
_MARKERS = "sPXv<>*h"


@paper_style
def dispersion_counterfactual(measurements: Measurements) -> Figure:
    """Draw δ_s and δ_h(k) = z(1) − z(k) of the same rows of scores, per layer of each full model.

    This is the within-model comparison: no sparse model is involved.

    Args:
        measurements: with columns ``dispersion_kK`` for full models.

    Returns:
        One panel per task, seed, size and snapshot.

    Raises:
        NothingToDrawError: if no full model was measured with counterfactual k.
    """
    queries = measurements.queries
    ks = sorted(int(name.removeprefix(_PREFIX)) for name in queries.columns if name.startswith(_PREFIX))
    full = measurements.models[measurements.models["attention"] == "full"]
    rows = queries[queries["model"].isin(full["model"])]
    ks = [k for k in ks if rows[f"{_PREFIX}{k}"].notna().any()]
    if not ks:
        raise NothingToDrawError("No full-attention model was measured with a counterfactual k.")
    panels = panels_of(full)
    columns = {"dispersion": attention_style("full"), **{f"{_PREFIX}{k}": _style(ks, k) for k in ks}}
    tables = {
        (str(model), name): pooled_table(group, name, by="layer").sort_values("layer")
        for model, group in rows.groupby("model", sort=False)
        for name in columns
    }
    low, high = positive_range(pd.concat(tables.values()), "p1", "p100")
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        _draw(ax, panel, columns, tables)
    axes[0].set_ylabel("dispersion (nats)")
    legend_on_top(figure, axes)
    note_below(
        figure, f"{READING}; marker: maximum.\nWithin one model: all boxes of a layer come from the same scores."
    )
    return figure


def _style(ks: list[int], k: int) -> AttentionStyle:
    """Heavy hitters' colour, paler with growing k."""
    place, topk = ks.index(k), attention_style("topk")
    shade = lightened(topk.color, 0.6 * place / max(len(ks) - 1, 1))
    color = "#" + "".join(f"{round(255 * part):02x}" for part in shade)
    return AttentionStyle(topk.name, color, _MARKERS[place % len(_MARKERS)], topk.line, topk.width)


def _draw(
    ax: Axes, panel: Panel, columns: dict[str, AttentionStyle], tables: dict[tuple[str, str], pd.DataFrame]
) -> None:
    boxes = [(series, name) for series in panel.series for name in columns]
    width = 0.84 / len(boxes)
    for place, (series, name) in enumerate(boxes):
        symbol = (
            "δₛ, all keys" if name == "dispersion" else f"δₕ({name.removeprefix(_PREFIX)}), largest scores only"
        )
        legend_entry(ax, symbol, columns[name])
        shift = (place - (len(boxes) - 1) / 2) * width
        for row in tables[series.model, name].to_dict("records"):
            draw_letter_values(ax, row["layer"] + shift, 0.85 * width, row, columns[name])
    label_layers(ax, panel, {series.model: tables[series.model, "dispersion"] for series in panel.series})
    ax.set_title(f"{panel.title}: within the full model")
