"""The tables that measurements are made of: their names, columns and types."""

from typing import Any

import pandas as pd

TABLES = ("models", "queries", "loads", "history", "non_finite")
# Columns without which nothing can be drawn.
NEEDED = {
    "models": "model sha256 source snapshot task attention k seed epoch blocks heads width length parameters "
    "samples inputs accuracy attention_found attention_captured residual",
    "queries": "model sample layer head query keys kept dispersion separation",
    "loads": "model sample layer head key load",
    "history": "model epoch",
    "non_finite": "model sample layer head scores",
}
# Columns of the models that older folders and models of other kinds lack, and what that means.
UNLESS_SAID: dict[str, Any] = {"global_tokens": 0, "norm": "pre", "pooling": "mean"}
# Tables of what was captured and what was not; absent from older folders.
AUDIT_TABLES = {
    "calls": {
        "model": "str",
        "layer": "int64",
        "module": "str",
        "occurrence": "int64",
        **dict.fromkeys(("mechanism", "mask"), "str"),
        **dict.fromkeys(("heads", "key_heads", "width", "calls"), "int64"),
        "residual": "float64",
    },
    "projections": {
        "model": "str",
        **dict.fromkeys(("layer", "head"), "int64"),
        **dict.fromkeys(("gamma", "upsilon"), "float64"),
        "reason": "str",
    },
    "remarks": {**dict.fromkeys(("model", "module", "text"), "str"), "times": "int64"},
    "skipped": {**dict.fromkeys(("model", "module", "operation", "reason"), "str"), "times": "int64"},
}
# Tables that only some commands measure: empty where they were not, absent from older folders.
OPTIONAL_TABLES = {
    "secants": {
        "model": "str",
        **dict.fromkeys(("sample", "layer", "head", "query"), "int32"),
        "level": "float64",
        "kept": "int32",
        **dict.fromkeys(("weight_change", "score_change", "score_change_max"), "float64"),
        "same_set": "bool",
        **dict.fromkeys(("dispersion", "separation"), "float64"),
    },
    "constants": {
        "model": "str",
        **dict.fromkeys(("layer", "head"), "int64"),
        **dict.fromkeys(("quantity", "form"), "str"),
        "ln_value": "float64",
        "holds": "bool",
        "assumptions": "str",
    },
    "parameters": {
        **dict.fromkeys(("model", "tensor"), "str"),
        "layer": "int64",
        "group": "str",
        **dict.fromkeys(("ln_sound", "ln_paper", "ln_gradient", "ln_secant"), "float64"),
        "holds": "bool",
    },
    "masks": {
        "model": "str",
        "level": "float64",
        **dict.fromkeys(("sample", "layer", "head", "query", "kept", "draws"), "int32"),
        "separation": "float64",
        **dict.fromkeys(("agreement", "exact", "certified"), "float32"),
        "certified_changed": "int32",
        **dict.fromkeys(("predicted", "swing_sd", "response"), "float32"),
    },
    "noise_effects": {
        "model": "str",
        "level": "float64",
        "sample": "int32",
        **dict.fromkeys(("logit_change", "flipped", "correct_before", "correct_after"), "float64"),
    },
    "sweep": {
        "model": "str",
        **dict.fromkeys(("layer", "head", "k"), "int64"),
        "quantity": "str",
        "queries": "int64",
        "mean": "float64",
        **{f"p{p}": "float64" for p in (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)},
        **dict.fromkeys(("undefined", "not_positive"), "int64"),
    },
    "landscape": {
        "model": "str",
        "plane": "int64",
        "kind": "str",
        **dict.fromkeys(("x", "y", "distance"), "float64"),
        "place": "str",
        "samples": "int64",
        **dict.fromkeys(("loss", "accuracy"), "float64"),
        **dict.fromkeys(("dispersion_p50", "dispersion_p95", "separation_p50", "separation_p5"), "float64"),
        "load_max": "float64",
    },
    "loss_secants": {
        **dict.fromkeys(("model", "group"), "str"),
        "draw": "int64",
        **dict.fromkeys(("radius", "distance", "slope"), "float64"),
    },
    "loss_gradients": {
        **dict.fromkeys(("model", "group"), "str"),
        "draw": "int64",
        **dict.fromkeys(("radius", "distance", "slope", "ln_sound"), "float64"),
        "holds": "bool",
    },
    "end_points": {
        **dict.fromkeys(("model", "group"), "str"),
        **dict.fromkeys(("estimate", "low", "high", "p_value"), "float64"),
        "accepted": "bool",
        "reason": "str",
        "blocks": "int64",
    },
    "jacobians": {
        "model": "str",
        **dict.fromkeys(("layer", "sample"), "int64"),
        "norm": "float64",
        "settled": "bool",
        "ln_sound": "float64",
    },
    "runs": {
        **dict.fromkeys(("model", "task", "attention", "kind"), "str"),
        "seed": "int64",
        "setting": "str",
        **dict.fromkeys(("epochs", "planned"), "int64"),
        "state": "str",
    },
    "along": {
        "model": "str",
        "epoch": "int64",
        "layer": "int64",
        **dict.fromkeys(("quantity", "statistic"), "str"),
        "value": "float64",
    },
    "predictors": {
        **dict.fromkeys(("model", "stage"), "str"),
        "epoch": "int64",
        "candidate": "str",
        "ln_value": "float64",
    },
    "lengths": {
        "model": "str",
        **dict.fromkeys(("length", "layer", "samples"), "int64"),
        **dict.fromkeys(("quantity", "statistic"), "str"),
        "value": "float64",
    },
}

EVERY_TABLE = (*TABLES, *AUDIT_TABLES, *OPTIONAL_TABLES)


def empty_table(name: str) -> pd.DataFrame:
    """Return an optional table without rows, with its columns and their types.

    Args:
        name: a key of :data:`AUDIT_TABLES` or :data:`OPTIONAL_TABLES`.
    """
    return typed(name, [])


def typed(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return an optional table with the given rows.

    Args:
        name: a key of :data:`AUDIT_TABLES` or :data:`OPTIONAL_TABLES`.
        rows: with its columns.
    """
    columns = (AUDIT_TABLES | OPTIONAL_TABLES)[name]
    return pd.DataFrame({column: [row[column] for row in rows] for column in columns}).astype(columns)
