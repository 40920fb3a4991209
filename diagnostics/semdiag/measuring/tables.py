"""The tables of every measurement, and those about a model's attention calls."""

import math
from typing import Any

from semdiag.measuring.table import Table

_PLACE = {"model": "str", **dict.fromkeys(("sample", "layer", "head"), "int32")}
# Tables of every measurement, with their required columns.
CORE = (
    Table(
        "models",
        "One row per model.",
        {
            **dict.fromkeys(("model", "sha256", "source", "snapshot", "task", "attention", "inputs"), "str"),
            **dict.fromkeys(("k", "seed", "epoch", "width"), "Int64"),
            **dict.fromkeys(("blocks", "heads", "length", "parameters", "samples"), "int64"),
            **dict.fromkeys(("attention_found", "attention_captured"), "int64"),
            **dict.fromkeys(("accuracy", "residual"), "float64"),
        },
    ),
    Table(
        "queries",
        "One row per query.",
        {
            **_PLACE,
            **dict.fromkeys(("query", "keys", "kept"), "int32"),
            **dict.fromkeys(("dispersion", "separation"), "float32"),
        },
    ),
    Table("loads", "One row per key.", {**_PLACE, "key": "int32", "load": "int32"}),
    Table("history", "One row per epoch of each training run.", {"model": "str", "epoch": "float64"}),
    Table(
        "non_finite",
        "One row per sample, layer and head with scores that are not finite.",
        {**_PLACE, "scores": "int64"},
    ),
)
TABLES = tuple(table.name for table in CORE)
# Values of columns of ``models`` that older folders and models of other kinds lack.
DEFAULTS: dict[str, Any] = {
    "global_tokens": 0, "weights_sha256": "", "norm": "pre", "pooling": "mean", "setting": "usual",
    "drawn": 0, "share": 1.0, "share_kept": 1.0, "residual_over_rounding": math.nan, "rounding": math.nan,
}  # fmt: skip
# Values of columns of other tables that older folders lack.
LATER: dict[str, dict[str, Any]] = {
    "remarks": {"code": "", "severity": "note"},
    "rerun": {"kept": math.nan, "keys": math.nan},
    "calls": {"residual_over_rounding": math.nan, "rounding": math.nan},
}
GONE = ("along", "predictors", "lengths", "end_points")  # tables in older folders, which nothing reads any more
# Those of them that enter calculations.
SHARES = Table("models", "One row per model.", {"drawn": "int64", "share": "float64", "share_kept": "float64"})
RESIDUALS = "residual", "residual_over_rounding", "rounding"
CALLS = Table(
    "calls",
    (
        "One row per attention layer (a module, and which of its calls in a forward pass): how it was captured, "
        "its mask, heads, number of calls and largest residual, relative to the largest output and in units of "
        "the possible effect of rounding, which itself is relative to the largest output."
    ),
    {
        "model": "str",
        "layer": "int64",
        "module": "str",
        "occurrence": "int64",
        **dict.fromkeys(("mechanism", "mask"), "str"),
        **dict.fromkeys(("heads", "key_heads"), "int64"),
        "width": "Int64",  # unknown where the scores alone are known
        "calls": "int64",
        **dict.fromkeys(RESIDUALS, "float64"),
    },
)
HEADS = Table(
    "heads",
    (
        "One row per head of a layer, means over its queries: entropy of the attention weights (nats; a learned "
        "sink included), and the weight on the first key that is not padding. Further, shares of the queries: "
        "first_key, that keep this key; first_key_kK, that have it among their K largest scores."
    ),
    {
        "model": "str",
        **dict.fromkeys(("layer", "head", "queries"), "int64"),
        **dict.fromkeys(("entropy", "first_weight"), "float64"),
    },
)
REMARKS = Table(
    "remarks",
    (
        "One row per remark on captured attention, such as a mask that adds -10,000. code: its kind; severity: "
        "warning if it invalidates an answer or concerns the user's request, else note."
    ),
    {**dict.fromkeys(("model", "module", "text", "code", "severity"), "str"), "times": "int64"},
)
# A remark on models whose mask separates the tokens that decide the label.
OUT_OF_REACH_CODE = "out-of-reach"
OUT_OF_REACH = (
    "with this mask, no weights can be right on every input of the task: pooling and head are additive, and no "
    "output sees all the tokens that together decide the label"
)
SKIPPED = Table(
    "skipped",
    "One row per operation that looks like attention but was not captured, with the reason.",
    {**dict.fromkeys(("model", "module", "operation", "reason"), "str"), "times": "int64"},
)
