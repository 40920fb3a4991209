"""The answer on two selections: do two engines choose alike?"""

from typing import Any

import numpy as np
import pandas as pd

from semdiag.measuring.findings.strict_json import Summary, json_ready, schema
from semdiag.questions.selections.measure.compare import BUG, NUMERIC, SAME, UNEXPLAINED, ComparedSelections


def comparison_summary(
    compared: ComparedSelections, file: str, against: str, provenance: dict[str, Any]
) -> Summary:
    """Return what ``--json`` prints of two selections."""
    rows, layers = compared.rows, layer_table(compared.rows)
    diverged = layers.loc[layers["changed"] > 0, "layer"]
    classes = rows["class"].value_counts()
    entry = {
        "file": file,
        "against": against,
        "tokens": compared.tokens,
        "heads": int(rows["head"].max()) + 1,
        "k": compared.k,
        "format": compared.format,
        "rows": len(rows),
        "overlap": float(rows["overlap"].mean()),
        "changed": int((rows["overlap"] < 1).sum()),
        "displacement": {"mean": float(rows["displacement"].mean()), "largest": float(rows["displacement"].max())},
        "classes": {str(name): int(number) for name, number in classes.items()},
        "by_own_scores": compared.by_own_scores,
        "layouts": list(compared.layouts),
        "ignored": list(compared.ignored),
        "first_layer": None if diverged.empty else int(diverged.iloc[0]),
        "lost": {
            "of": compared.weight_of,
            "mean": float(rows["lost"].mean()),
            "largest": float(rows["lost"].max()),
        },
        "worst": _worst(rows),
        "repeats": {"file": compared.repeats[0], "against": compared.repeats[1]},
        "layers": layers.to_dict("records"),
        "passed": int(classes[BUG] + classes[UNEXPLAINED]) == 0,
    }
    return Summary(json_ready({"schema": schema("selections"), "provenance": provenance, "results": [entry]}))


def layer_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each layer."""
    differs = rows["overlap"] < 1
    first = rows[differs].groupby("token")["layer"].min().value_counts()
    table = pd.DataFrame({"layer": rows["layer"], "rows": 1, "overlap": rows["overlap"], "changed": differs})
    for name in (NUMERIC, BUG, UNEXPLAINED):
        table[name] = rows["class"] == name
    table["lost"] = rows["lost"]
    how = {"rows": "sum", "overlap": "mean", "changed": "sum", NUMERIC: "sum", BUG: "sum", UNEXPLAINED: "sum"}
    layers = table.groupby("layer", as_index=False).agg({**how, "lost": "mean"})
    counts = layers["layer"].map(first).fillna(0).astype("int64")
    layers.insert(4, "first", counts)
    return layers


def _worst(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the row with the smallest overlap; of several, the first that rounding does not explain."""
    explained = rows["class"].isin((SAME, NUMERIC)).to_numpy()
    row = rows.iloc[int(np.lexsort((explained, rows["overlap"].to_numpy()))[0])]
    place = {name: int(row[name]) for name in ("token", "layer", "head")}
    return {**place, "overlap": float(row["overlap"]), "class": str(row["class"]), "lost": float(row["lost"])}
