"""What k costs and buys in models trained with it: speed, accuracy, separation, mask stability. Exploratory.

    semdiag sweep experiments/speed.toml --in-a-step 18        # or the runs that are there
    python experiments/k_ablation.py --out reports/k_ablation

Top-k attention of the study of speed (k = 1, 2, 3, 5, 8, 12) and full attention: seven tasks, three seeds.
Learning and accuracy come from the committed records; separation and mask stability are measured on the trained
models that ``--runs`` holds (``semdiag mask-stability --noise 0.01``, 50 held-out samples, all layers); of other
models what the table in ``--out`` says is kept, with the hash of the file that was measured.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pack_records import read_history

from semdiag.presenting.drawing.style import attention_style, finished, panel_grid, paper_style, plain_numbers
from semdiag_models.sweep import SweepRun, read_sweep

HERE = Path(__file__).parent
PANELS = {
    "loss": "training loss\n/ ln(classes)",
    "accuracy": "held-out\naccuracy",
    "separation": "median Δ\n(nats)",
    "unchanged": "masks that\nstay, 1% noise",
}
MEASURED = ["run", "sha256", "queries", "separation", "unchanged"]  # of the weights; the records tell the rest


def learning(runs: list[SweepRun], records: Path) -> pd.DataFrame:
    """Task, k (NaN: full attention), seed, mean training loss over ln(classes), final held-out accuracy."""
    rows = []
    for run in runs:
        history = read_history(records, run)
        if history is None:
            raise SystemExit(f"{records} has no record of {run.name}.")
        loss = float(np.mean(history["train_loss"])) / math.log(run.model.classes)
        facts = {"run": run.name, "task": run.training.task, "k": run.model.k, "seed": run.training.seed}
        rows.append(facts | {"loss": loss, "accuracy": history["holdout_accuracy"][-1]})
    return pd.DataFrame(rows)


def selections(paths: list[Path]) -> pd.DataFrame:
    """Run, median separation and share of masks that no draw changes, by ``semdiag mask-stability``."""
    if not paths:
        return pd.DataFrame(columns=MEASURED)
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "semdiag", "mask-stability", *map(str, paths), "--noise", "0.01"]
        command += ["--samples", "50", "--figures", "none", "--quiet", "--json", "--out", f"{out}/page"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows = []
    for result in json.loads(done.stdout)["results"]:
        pooled = result["levels"][0]["all"]
        facts = {
            "run": Path(result["model"]).parent.name,
            "sha256": result["sha256"],
            "queries": pooled["queries"],
        }
        rows.append(facts | {"separation": pooled["separation_p50"], "unchanged": pooled["exact"]})
    return pd.DataFrame(rows, columns=MEASURED)


def with_earlier(measured: pd.DataFrame, file: Path) -> pd.DataFrame:
    """What is measured now, and of other runs what the file says."""
    if not file.exists():
        return measured
    earlier = pd.read_csv(file)[MEASURED].dropna()
    kept = earlier[~earlier["run"].isin(measured["run"])]
    return pd.concat([part for part in (measured, kept) if len(part)] or [measured], ignore_index=True)


@paper_style
def figure(table: pd.DataFrame) -> Figure:
    """A row per quantity, a column per task: means over seeds against k, bars from the smallest to the largest."""
    tasks, ks = table["task"].unique(), sorted(int(k) for k in table["k"].dropna().unique())
    drawn, axes = panel_grid(len(PANELS) * len(tasks), height=1.35, sharey=False, columns=len(tasks))
    places, topk, full = [*ks, 0], attention_style("topk"), attention_style("full")
    for (row, name), (column, task) in product(enumerate(PANELS), enumerate(tasks)):
        ax = axes[row * len(tasks) + column]
        own = table[table["task"] == task].assign(k=table["k"].fillna(0))
        seeds = own.groupby("k")[name].agg(["mean", "min", "max"]).dropna()
        for style, part in ((topk, seeds[seeds.index > 0]), (full, seeds[seeds.index == 0])):
            x = [places.index(int(k)) for k in part.index]
            ax.vlines(x, part["min"], part["max"], color=style.color, linewidth=1.0)
            ax.plot(x, part["mean"], color=style.color, marker=style.marker, markersize=3.5, linewidth=1.2)
            if style is full and len(part):
                ax.axhline(part["mean"].iloc[0], color=style.color, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0)
        ends = table[name].min(), table[name].max()
        if name == "separation":
            ax.set_yscale("log")
            ax.set_ylim(ends[0] / 1.2, ends[1] * 1.2)
            ax.set_yticks([0.05, 0.1, 0.2, 0.5])
            plain_numbers(ax.yaxis)
        else:
            ax.set_ylim(ends[0] - 0.05 * (ends[1] - ends[0]), ends[1] + 0.05 * (ends[1] - ends[0]))
        ticks = [str(k) if place % 2 == 0 else "" for place, k in enumerate(ks)]
        ax.set_xticks(range(len(places)), [*ticks, "full"] if row == len(PANELS) - 1 else [])
        ax.tick_params(labelsize=8, labelleft=not column)
        ax.set_xlim(-0.5, len(ks) + 0.7)
        if not row:
            ax.set_title(task, fontsize=8.5)
        if not column:
            ax.set_ylabel(PANELS[name], fontsize=8.5)
    return finished(
        drawn,
        "Across: k, of models trained with it (orange), and full attention (grey, dashed); "
        "two blocks of width 32; means of three seeds, bars: their range. "
        "A k that would keep all keys is left out. Separation and masks "
        "pool the queries of both layers, "
        f"of {table['separation'].count()} of {table['k'].count()} runs.",
    )


def main() -> None:
    """Measure, and write the table and the figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path("runs/speed"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = [
        run
        for run in read_sweep(HERE / "speed.toml")
        if run.model.attention in ("full", "topk") and run.model.inverse_temperature == 1
    ]
    learned = learning(runs, HERE / "speed")
    sparse = [arguments.runs / run.name / "last.pt" for run in runs if run.model.k is not None]
    paths = [path for path in sparse if path.exists()]
    file = arguments.out / "k_ablation.csv"
    table = learned.merge(with_earlier(selections(paths), file), on="run", how="left")
    print(
        f"Separation and masks: measured now on {len(paths)} of {len(sparse)} runs, whose weights are in "
        f"{arguments.runs}; of {table['separation'].count() - len(paths)} kept from {file}."
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(file, index=False, float_format="%.6g")
    drawn = figure(table)
    drawn.savefig(arguments.out / "k_ablation.svg")
    means = table.assign(k=table["k"].fillna(0).astype(int)).groupby("k")[list(PANELS)].mean()
    print(means.to_string(float_format=lambda value: f"{value:.3g}"))


if __name__ == "__main__":
    main()
