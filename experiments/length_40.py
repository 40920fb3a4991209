"""The paper's length-40 tasks at its own recipe: full, top-5 and, on two of them, fixed masks, beside its figures.

    OMP_WAIT_POLICY=PASSIVE semdiag sweep experiments/length-40.toml --records experiments/length-40
    python experiments/length_40.py --out reports/length-40

Two tables. ``runs.csv``, a row per run that ended: epochs to three training accuracies, and where training
ended, from the committed records and, for even-pairs and the first seed of missing-duplicate, from the
reference checkpoints. ``percentiles.csv``, a row per pair of runs, quantity and percentile: δ of both models, Δ
and key load of top-5 and the left sides of the paper's two conditions (``semdiag bounds``, 500 held-out
samples, all layers pooled), beside the paper's figures for the tasks that these show; of Δ, whose small values
count, those at 100 minus the percentile. Measured are the pairs whose weights are on this machine: references, and
runs in ``--runs``; of the other runs, of which the record alone is kept, the rows stay that the table has (of
the nine pairs measured before this was written four digits; the others have twelve).
"""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from pack_records import read_history

from semdiag.mathematics.bounds.corollary import paper_input_condition, paper_weight_condition
from semdiag_models import TASKS
from semdiag_models.sweep import SweepRun, read_sweep

HERE = Path(__file__).parent
REFERENCES = HERE.parent / "checkpoints"
REACHED = (0.85, 0.95, 0.999)
ATTENTIONS = ("full", "topk-5", "banded-5-global-1", "block-5-global-1")  # in this order in the table
PERCENTILES = (75, 90, 95, 100)
PUBLISHED_AS = {"parity": "Parity", "even-pairs": "Even pairs", "missing-duplicate": "Missing duplicates"}
# By quantity: the parameter and the column of corollary.csv, and the column of the paper's table.
QUANTITIES = {
    "δ full": ("W", "full_dispersion", "full_dispersion"),
    "δ top-5": ("W", "dispersion", "dispersion"),
    "Δ top-5": ("W", "separation", "separation"),
    "load top-5": ("W", "load", "load"),
    "condition in W": ("W", "value", "weight_left_side"),
    "condition in X": ("X", "value", "input_left_side"),
}

# Source: the table of dispersions, separations and loads in arXiv 2506.14095. Top-k with k = 5; percentiles
# 75, 90, 95, 100 of dispersions and loads, 25, 10, 5, 0 of separations.
_PUBLISHED = {
    "ListOps": {
        "full_dispersion": (8.61, 18.5, 29.4, 87.8),
        "dispersion": (3.51, 6.74, 9.67, 28.2),
        "separation": (0.016, 0.005, 0.002, 1e-9),
        "load": (1, 3, 15, 598),
    },
    "Parity": {
        "full_dispersion": (8.30, 10.1, 11.2, 19.4),
        "dispersion": (2.31, 3.13, 3.78, 9.16),
        "separation": (0.062, 0.022, 0.011, 1e-6),
        "load": (8, 13, 16, 33),
    },
    "Even pairs": {
        "full_dispersion": (2.03, 4.73, 9.44, 14.6),
        "dispersion": (1.03, 2.84, 5.50, 8.25),
        "separation": (0.009, 0.003, 0.002, 3e-8),
        "load": (6, 17, 26, 40),
    },
    "Missing duplicates": {
        "full_dispersion": (4.63, 9.25, 17.1, 23.9),
        "dispersion": (2.36, 4.25, 4.88, 10.5),
        "separation": (0.018, 0.006, 0.003, 1e-7),
        "load": (7, 15, 21, 40),
    },
}


@dataclass(frozen=True)
class Run:
    """A run: what was trained, its folder, and its history (None: not finished)."""

    task: str
    attention: str
    seed: int
    folder: Path
    history: pd.DataFrame | None


def references() -> Iterator[Run]:
    """The shipped checkpoints."""
    for file in sorted(REFERENCES.glob("*/history.csv")):
        name, seed = file.parent.name.split("-seed-")
        (task,) = (task for task in TASKS if name.startswith(f"{task}-"))
        yield Run(task, name.removeprefix(f"{task}-"), int(seed), file.parent, pd.read_csv(file))


def swept(runs: list[SweepRun], records: Path, folder: Path) -> Iterator[Run]:
    """The runs of the sweep, finished or not."""
    for run in runs:
        history = read_history(records, run)
        table = None if history is None else pd.DataFrame(history)
        yield Run(run.training.task, run.model.attention_label, run.training.seed, folder / run.name, table)


def _ranks(column: pd.Series) -> pd.Series:
    return column.map(ATTENTIONS.index) if column.name == "attention" else column


def arrivals(run: Run, history: pd.DataFrame) -> dict[str, object]:
    """When a run reached each training accuracy (NaN: never), and where it ended."""
    row: dict[str, object] = {"task": run.task, "seed": run.seed, "attention": run.attention}
    for level in REACHED:
        row[f"epochs_to_{level:g}"] = history.loc[history["train_accuracy"] >= level, "epoch"].min()
    last = history.iloc[-1]
    return row | {
        "epochs": int(last["epoch"]),
        "train_accuracy": last["train_accuracy"],
        "holdout_accuracy": last["holdout_accuracy"],
        "best_holdout_accuracy": history["holdout_accuracy"].max(),
    }


def published_table() -> pd.DataFrame:
    """Return the paper's percentiles and the left sides of its own conditions for them.

    Returns:
        One row per task and percentile: task, percentile, full_dispersion (δ_s), dispersion (δ_h),
        separation (Δ_h), load, weight_left_side (eq. 304) and input_left_side (eq. 305, β = load / k).

    Example:
        >>> table = published_table()
        >>> print(f"{table.task[0]}, p{table.percentile[0]}: {table.weight_left_side[0]:.3f}")
        ListOps, p75: 0.970
    """
    parts = []
    for task, columns in _PUBLISHED.items():
        table = pd.DataFrame({"task": task, "percentile": PERCENTILES, **columns})
        delta_s, delta, gap, load = (
            torch.tensor(table[name].to_numpy(float))
            for name in ("full_dispersion", "dispersion", "separation", "load")
        )
        weight = paper_weight_condition(delta_s, delta, gap)
        inputs = paper_input_condition(delta_s, delta, gap, load / 5)
        sides = {"weight_left_side": weight.left_side.numpy(), "input_left_side": inputs.left_side.numpy()}
        parts.append(table.assign(**sides))
    return pd.concat(parts, ignore_index=True)


def against_paper(task: str, conditions: pd.DataFrame) -> pd.DataFrame:
    """Quantity, percentile, ours, the paper's, and their ratio (NaN where the paper shows none).

    Args:
        task: its name.
        conditions: ``corollary.csv`` of ``semdiag bounds`` for the pair.
    """
    paper_form = conditions[conditions["form"] == "paper"].set_index(["parameter", "percentile"])
    table = published_table()
    theirs = table[table["task"] == PUBLISHED_AS.get(task)].set_index("percentile")
    rows = []
    for quantity, (parameter, column, published) in QUANTITIES.items():
        for percentile in PERCENTILES:
            ours, paper = (
                paper_form.loc[(parameter, percentile), column],
                theirs[published].get(percentile, math.nan),
            )
            at = 100 - percentile if quantity == "Δ top-5" else percentile
            rows.append({"quantity": quantity, "percentile": at, "ours": ours, "paper": paper})
    table = pd.DataFrame(rows)
    return table.assign(ratio=table["ours"] / table["paper"])


def conditions_of(full: Path, topk: Path) -> pd.DataFrame:
    """``corollary.csv`` of two trained models, by ``semdiag bounds``."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "semdiag", "bounds", str(topk), "--against", str(full)]
        command += ["--figures", "none", "--quiet", "--out", f"{out}/page"]
        subprocess.run(command, check=True, stdout=subprocess.PIPE)
        table = pd.read_csv(f"{out}/page/data/corollary.csv")
    return table[table["percentile"].notna()]


def with_earlier(measured: pd.DataFrame, earlier: pd.DataFrame) -> pd.DataFrame:
    """Rows measured now, and the earlier ones of pairs that were not, by task and seed.

    Example:
        >>> now = pd.DataFrame({"task": ["parity", "even-pairs"], "seed": [1, 1], "ours": [0.5, 0.6]})
        >>> before = pd.DataFrame({"task": ["even-pairs", "even-pairs"], "seed": [1, 2], "ours": [0.7, 0.8]})
        >>> with_earlier(now, before)["ours"].tolist()
        [0.6, 0.8, 0.5]
    """
    pairs = pd.MultiIndex.from_frame(measured[["task", "seed"]])
    kept = earlier[~pd.MultiIndex.from_frame(earlier[["task", "seed"]]).isin(pairs)]
    return pd.concat([measured, kept]).sort_values(["task", "seed"], kind="stable")


def runs_in_words(table: pd.DataFrame) -> str:
    """Markdown of ``runs.csv``, a row per task and attention, seeds side by side.

    Example:
        >>> row = {"task": "parity", "seed": 1, "attention": "full", "epochs": 9, "train_accuracy": 1.0}
        >>> arrived = {"epochs_to_0.85": 3, "epochs_to_0.95": 4.0, "epochs_to_0.999": float("nan")}
        >>> row |= arrived | {"holdout_accuracy": 0.5, "best_holdout_accuracy": 0.52}
        >>> print(runs_in_words(pd.DataFrame([row])).splitlines()[-1])
        | parity | full | 3 | 4 | > 9 | 100.0% | 52.0% |
    """
    head = [
        "task",
        "attention",
        *(f"epochs to {100 * level:g}%" for level in REACHED),
        "training accuracy",
        "best held-out",
    ]
    lines = [head, ["---"] * len(head)]
    for (task, attention), own in table.groupby(["task", "attention"], sort=False):
        rows = own.to_dict("records")
        arrived = [
            ", ".join(f"> {r['epochs']:.0f}" if pd.isna(r[name]) else f"{r[name]:.0f}" for r in rows)
            for name in (f"epochs_to_{level:g}" for level in REACHED)
        ]
        ended = [", ".join(f"{r[name]:.1%}" for r in rows) for name in ("train_accuracy", "best_holdout_accuracy")]
        lines.append([str(task), str(attention), *arrived, *ended])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percentiles_in_words(table: pd.DataFrame) -> str:
    """Markdown of ``percentiles.csv``, a row per pair and quantity: ours, in brackets ours over the paper's."""
    head = ["task, seed", "", *(f"p{percentile}" for percentile in PERCENTILES)]
    lines = [head, ["---"] * len(head)]
    for (task, seed, quantity), own in table.groupby(["task", "seed", "quantity"], sort=False):
        rows = own.to_dict("records")
        cells = [f"{r['ours']:.3g}" + ("" if pd.isna(r["ratio"]) else f" ({r['ratio']:.2g})") for r in rows]
        name = "Δ top-5 at p25, p10, p5, p0" if quantity == "Δ top-5" else str(quantity)
        lines.append([f"{task}, {seed}", name, *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Read the records, measure the pairs that are there, and write both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path("runs/length-40"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sweep = swept(read_sweep(HERE / "length-40.toml"), HERE / "length-40", arguments.runs)
    runs = [*references(), *sweep]
    arguments.out.mkdir(parents=True, exist_ok=True)
    ended = [arrivals(run, run.history) for run in runs if run.history is not None]
    table = pd.DataFrame(ended).sort_values(["task", "seed", "attention"], key=_ranks, kind="stable")
    table.to_csv(arguments.out / "runs.csv", index=False)
    file = arguments.out / "percentiles.csv"
    earlier = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["task", "seed"])
    pairs = []
    for full in (run for run in runs if run.attention == "full"):
        (topk,) = (r for r in runs if (r.task, r.seed) == (full.task, full.seed) and r.attention == "topk-5")
        files = [run.folder / "last.pt" for run in (full, topk)]
        if full.history is None or topk.history is None:
            print(f"{full.task}, seed {full.seed}: a run of the two has not ended.")
        elif all(weights.exists() for weights in files):
            found = against_paper(full.task, conditions_of(*files))
            pairs.append(found.assign(task=full.task, seed=full.seed))
        elif not len(earlier[(earlier["task"] == full.task) & (earlier["seed"] == full.seed)]):
            print(f"{full.task}, seed {full.seed}: not measured, its weights are not in {full.folder.parent}.")
    measured = pd.concat(pairs)[["task", "seed", "quantity", "percentile", "ours", "paper", "ratio"]]
    with_earlier(measured, earlier).to_csv(file, index=False, float_format="%.12g")
    print(runs_in_words(table))
    print(percentiles_in_words(pd.read_csv(file)))


if __name__ == "__main__":
    main()
