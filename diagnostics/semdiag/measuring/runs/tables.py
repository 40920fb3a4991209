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
ALONG = Table(
    "along",
    "One row per snapshot of a run, layer (ALL: pooled) and number.",
    {
        "model": "str",
        "epoch": "int64",
        "layer": "int64",
        **dict.fromkeys(("quantity", "statistic"), "str"),
        "value": "float64",
    },
)
PREDICTORS = Table(
    "predictors",
    "One row per snapshot of a run and number that may predict its speed.",
    {
        "model": "str",
        "epoch": "int64",
        "candidate": "str",
        "ln_value": "float64",
    },
)
LENGTHS = Table(
    "lengths",
    "One row per length of the inputs, layer (ALL: pooled) and number.",
    {
        "model": "str",
        **dict.fromkeys(("length", "layer", "samples"), "int64"),
        **dict.fromkeys(("quantity", "statistic"), "str"),
        "value": "float64",
    },
)

RUN_TABLES = (RUNS, ALONG, PREDICTORS, LENGTHS)
