"""Dispersion, entropy and weight on the first key of every head."""

import pandas as pd

from semdiag.measuring.findings.estimates import counterfactual_ks
from semdiag.measuring.findings.findings import Findings, modules_by_layer, records
from semdiag.measuring.words import counted, layer_name
from semdiag.presenting.section import Answer, Glance

_PLACE = ["model", "layer", "head"]
_EXTREMES = (  # column, whether the largest or the smallest, in words
    ("dispersion", True, "scores furthest apart (median δ {:.3g} nats)"),
    ("dispersion", False, "scores closest together (median δ {:.2g} nats)"),
    ("first_weight", True, "most weight on the first key ({:.0%})"),
    ("entropy", False, "most focused (entropy {:.2g} nats)"),
    ("entropy", True, "most even (entropy {:.3g} nats)"),
)


def head_table(findings: Findings) -> pd.DataFrame:
    """Return one row per model, layer and head; layers and heads count from 0."""
    measurements = findings.measurements
    queries = measurements.queries
    finite = queries[queries["dispersion"].abs() < float("inf")]
    table = finite.groupby(_PLACE, sort=False)["dispersion"].median().rename("dispersion").to_frame()
    if "largest_weight" in queries:
        table["largest_weight"] = queries.groupby(_PLACE, sort=False)["largest_weight"].median()
    k = first_k(findings)
    sums = queries.groupby(_PLACE, sort=False)[["kept", "keys"]].sum()
    keeps_all = sums["kept"] == sums["keys"]
    heads = measurements.heads.set_index(_PLACE)
    first_key = heads.reindex(index=table.index, columns=["first_key", f"first_key_k{k}"]).astype("float64")
    table["first_key"] = first_key["first_key"].mask(keeps_all).fillna(first_key[f"first_key_k{k}"])
    if k is not None and f"mass_k{k}" in queries:
        table["mass"] = queries.groupby(_PLACE, sort=False)[f"mass_k{k}"].median()
    table = table.join(heads[["entropy", "first_weight"]]) if len(heads) else table
    return table.reset_index()


def heads_glance(findings: Findings) -> Glance:
    """Return how much of its weight a head puts on the first key: the mean, and the largest."""
    table = findings(head_table)
    known = table.dropna(subset=["first_weight"]) if "first_weight" in table else table.iloc[:0]
    if known.empty:
        return Glance(Answer.MEASURED, counted(len(table), "head"), "measured")
    most = records(known.sort_values("first_weight"))[-1]
    layer = layer_name(most["layer"], findings(modules_by_layer, most["model"]))
    return Glance(
        Answer.MEASURED, f"{100 * known['first_weight'].mean():.0f}%",
        f"of a head's weight is on the first key, mean over {counted(len(known), 'head')}; the most is "
        f"{100 * most['first_weight']:.0f}%, head {most['head']} of layer {layer}",
    )  # fmt: skip


def outlying_heads(findings: Findings) -> list[tuple[int, int, str]]:
    """Return the heads with extreme δ, weight on the first key and entropy; none for several models."""
    table = findings(head_table)
    if len(findings.measurements.models) != 1 or len(table) < 2:
        return []
    words_of: dict[tuple[int, int], list[str]] = {}
    for column, largest, words in _EXTREMES:
        rows = table.dropna(subset=[column]) if column in table else table.iloc[:0]
        if len(rows):
            row = records(rows.sort_values(column, kind="stable"))[-1 if largest else 0]
            words_of.setdefault((int(row["layer"]), int(row["head"])), []).append(words.format(row[column]))
    return [(layer, head, ", ".join(words)) for (layer, head), words in words_of.items()]


def first_k(findings: Findings) -> int | None:
    """Return the smallest k measured within models that keep every key; None if there is none."""
    return min(counterfactual_ks(findings.measurements.queries), default=None)
