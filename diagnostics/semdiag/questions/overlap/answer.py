"""Do layers, heads and successive queries keep the same keys? Jaccard indices beside chance, and their map."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.findings import Findings, Summary, records
from semdiag.measuring.findings.resampling import mean_interval
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, decimals, interval, interval_words, text
from semdiag.presenting.answer import Answer, Claim, Shown, heading, measured_glance, title, with_facts
from semdiag.presenting.drawing.panels import NothingToDrawError, heat_map, model_labels, name_cells
from semdiag.presenting.drawing.style import drawing, note_below, panel_grid
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.overlap.measure import OVERLAP

_COLUMNS = [
    "model", "what", "layer", "other_layer", "pairs", "queries", "samples", "jaccard", "low", "high", "chance",
]  # fmt: skip


def overlap_table(findings: Findings) -> pd.DataFrame:
    """Return the mean Jaccard index between layers, between heads of a layer, and between successive queries."""
    rows = [
        {"model": model, **row}
        for model, pairs in findings.measurements[OVERLAP].groupby("model", sort=False)
        for row in _of_model(pairs)
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


def _of_model(pairs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    pair = pairs["kind"] == "pair"
    same = pairs["layer"] == pairs["other_layer"]
    parts = {"layers": pairs[pair & ~same], "heads": pairs[pair & same], "previous": pairs[~pair]}
    for what, rows in parts.items():
        if rows.empty:
            continue
        yield _described(what, ALL, ALL, rows)
        for (layer, second_layer), part in rows.groupby(["layer", "other_layer"], sort=True):
            yield _described(what, int(str(layer)), int(str(second_layer)), part)


def _described(what: str, layer: int, second_layer: int, rows: pd.DataFrame) -> dict[str, Any]:
    interval = mean_interval(rows, "jaccard").if_varied()
    places = ["layer", "head", "other_layer", "other_head"]
    return {
        "what": what, "layer": layer, "other_layer": second_layer, "pairs": len(rows[places].drop_duplicates()),
        "queries": int(rows["queries"].sum()), "samples": rows["sample"].nunique(), "jaccard": interval.estimate,
        "low": interval.low, "high": interval.high, "chance": float(rows["chance"].mean()),
    }  # fmt: skip


def answer(findings: Findings) -> Answer:
    """Return the overlap of every model's masks, or why there is none."""
    table = findings(overlap_table)
    remarks = findings.measurements.remarks
    results: dict[str, Summary] = {}
    shown: list[Shown] = []
    for model in findings.measurements.models["model"]:
        rows = records(table[table["model"] == model].drop(columns="model"))
        results[model] = {"overlap": rows}
        if rows:
            shown += [f"{title(findings, model)}: Jaccard index of kept keys", NumberTable(_COLUMNS_SHOWN, rows)]
        else:
            reasons = remarks.loc[(remarks["model"] == model) & (remarks["code"] == "no-overlap"), "text"]
            reason = next(iter(reasons), "no two masks to compare (a query that drops no key has none)")
            shown.append(f"{title(findings, model)}: {reason}")
    return Answer(
        glance=measured_glance(findings, findings.measurements[OVERLAP]), details=_overlap_claims(findings),
        tables={"overlap": with_facts(findings, table)}, results=results,
        more={"k": findings.measurements.provenance.get("overlap_k")}, shown=shown,
    )  # fmt: skip


def _layer(layer: int) -> str:
    return "all" if layer == ALL else str(layer)


_three_decimals = partial(decimals, places=3)
_interval = partial(interval, form=_three_decimals, unknown="no interval")
_COLUMNS_SHOWN = (
    Column("what", "between", text), Column("layer", form=_layer), Column("other_layer", "and layer", _layer),
    Column("pairs", drop=1), Column("jaccard", "index", _three_decimals, drop=NEVER),
    Column("low high", "95%", _interval, drop=2), Column("chance", "at random", _three_decimals, drop=NEVER),
)  # fmt: skip
_BETWEEN = {"layers": "two layers", "heads": "two heads of a layer", "previous": "a query and the one before it"}


def _overlap_claims(findings: Findings) -> list[Claim]:
    table = findings(overlap_table)
    models = findings.measurements.models
    kinds = dict(zip(models["model"], models["attention"], strict=True))
    ends = partial(interval_words, form="{:.3f}".format, level="")
    claims = []
    for model, label in model_labels(models).items():
        if kinds[model] in DENSE:
            label += f", the mask that top-{findings.measurements.provenance.get('overlap_k')} would choose"
        rows = records(table[(table["model"] == model) & (table["layer"] == ALL)])
        if not rows:
            nothing = "no query drops a key at both of two places, so nothing can be compared"
            claims.append(Claim("nothing-compared", f"{label}: {nothing}.", model))
        for row in rows:
            sentence = (
                f"{label}: mean Jaccard index of the kept keys of {_BETWEEN[row['what']]} {row['jaccard']:.3f} "
                f"({ends(row['low'], row['high'], samples=row['samples'])}; at random "
                f"{row['chance']:.3f}; {counted(row['pairs'], 'pair')}, {counted(row['samples'], 'sample')})."
            )
            interval = (row["low"], row["high"])
            claims.append(Claim(row["what"], sentence, model, row["jaccard"], "Jaccard index", interval))
    return claims


_WRITTEN = 14  # layers up to which the cells bear their numbers


@drawing(
    "Mean Jaccard index of the kept keys as coloured cells, layer by layer, heads of a layer on the diagonal, and "
    "beside it for successive queries: {shown}.",
    "A dark cell is a pair of layers that keep the same keys for the same query, and could share one selection; "
    "the column on the right says how much of a selection the next query could reuse. Compare with the value of "
    "random sets in the panel's title.",
)
def mask_overlap(findings: Findings) -> Figure:
    """Draw the mean Jaccard index of kept keys for every two layers, and for successive queries."""
    table = findings(overlap_table)
    compared = {*table["model"]}
    labels = {m: label for m, label in model_labels(findings.measurements.models).items() if m in compared}
    if not labels:
        raise NothingToDrawError("No masks were compared.")
    layers = sorted({*table["layer"], *table["other_layer"]} - {ALL})
    figure, axes = panel_grid(len(labels), height=1.5 + 0.26 * min(len(layers), 24), sharey=False)
    for ax, (model, label) in zip(axes, labels.items(), strict=True):
        of_model = table[table["model"] == model]
        cells = np.full((len(layers), len(layers) + 2), np.nan)
        for row in of_model[of_model["layer"] != ALL].to_dict("records"):
            at = layers.index(row["layer"])
            to = layers.index(row["other_layer"])
            if row["what"] == "previous":
                cells[at, -1] = row["jaccard"]
            else:
                cells[at, to] = cells[to, at] = row["jaccard"]
        heat_map(ax, cells, Normalize(0, 1), "{:.2f}".format if len(layers) <= _WRITTEN else None)
        for axis in (ax.xaxis, ax.yaxis):
            name_cells(axis, layers)
        ax.set_xticks([len(layers) + 1], ["prev."], minor=True)
        ax.set_xlabel("layer; prev.: the query before")
        chance = of_model.loc[of_model["layer"] == ALL, "chance"]
        ax.set_title(f"{label}\nat random {chance.mean():.2f}", fontsize=9)
    axes[0].set_ylabel("layer")
    note = "Jaccard index of kept keys, mean over queries that drop a key, samples, pairs of heads; diagonal: two "
    note_below(figure, note + "heads of a layer.")
    return figure


HEADINGS = heading(
    "overlap", "Do layers keep the same keys?", (mask_overlap,),
    "A model that keeps every key is judged by the masks that top-k would choose from its scores. Queries with "
    "too few keys to drop one are left out.",
    "The index counts keys, not weights: two heads may share all but the key that matters. Masks that do not "
    "depend on the input overlap by construction.",
)  # fmt: skip
