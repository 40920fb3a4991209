"""The tables of training runs."""

from semdiag.measuring.table import Table

RUNS = Table(
    "runs",
    "One row per training run.",
    {
        **dict.fromkeys(("model", "task", "attention", "kind"), "str"),
        "seed": "int64",
        "setting": "str",
        **dict.fromkeys(("epochs", "planned"), "int64"),
        "state": "str",
    },
)
RUN_TABLES = (RUNS,)
