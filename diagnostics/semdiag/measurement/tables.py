"""The tables that every measurement has, and what a model's attention calls say of themselves."""

from typing import Any

from semdiag.measurement.table import Table

TABLES = ("models", "queries", "loads", "history", "non_finite")
# Columns without which nothing can be drawn.
NEEDED = {
    "models": "model sha256 source snapshot task attention k seed epoch blocks heads width "
    "length parameters samples inputs accuracy attention_found attention_captured residual",
    "queries": "model sample layer head query keys kept dispersion separation",
    "loads": "model sample layer head key load",
    "history": "model epoch",
    "non_finite": "model sample layer head scores",
}
# Columns of the models that older folders and models of other kinds lack, and what that means.
UNLESS_SAID: dict[str, Any] = {"global_tokens": 0, "norm": "pre", "pooling": "mean"}
CALLS = Table(
    "calls",
    (
        "One row per place where attention happens (a module, and which of its calls in a forward): how "
        "it was captured, its mask, heads, number of calls and largest residual."
    ),
    {
        "model": "str",
        "layer": "int64",
        "module": "str",
        "occurrence": "int64",
        **dict.fromkeys(("mechanism", "mask"), "str"),
        **dict.fromkeys(("heads", "key_heads", "width", "calls"), "int64"),
        "residual": "float64",
    },
)
REMARKS = Table(
    "remarks",
    "One row per thing to know about a captured attention, as a mask that adds -10,000.",
    {**dict.fromkeys(("model", "module", "text"), "str"), "times": "int64"},
)
SKIPPED = Table(
    "skipped",
    "One row per operation that looks like attention and was not captured, with the reason.",
    {**dict.fromkeys(("model", "module", "operation", "reason"), "str"), "times": "int64"},
)
