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
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from semdiag.presenting.drawing.style import finished, panel_grid, paper_style, plain_numbers
from semdiag_models.sweep import SweepRun, read_history, read_sweep

HERE = Path(__file__).parent
PANELS = {
    "loss": "mean training loss / ln(classes)",
    "accuracy": "held-out accuracy at the end",
    "separation": "separation Δ, median (nats)",
    "unchanged": "masks unchanged by 1% noise",
}
MEASURED = ["run", "sha256", "queries", "separation", "unchanged"]  # of the weights; the records tell the rest
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


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
    """Four panels against k, a line per task: mean over seeds, and a bar from the smallest to the largest."""
    drawn, axes = panel_grid(4, height=2.9, sharey=False, columns=2)
    ks = sorted(int(k) for k in table["k"].dropna().unique())
    places = {k: place for place, k in enumerate([*ks, None])}
    for ax, (name, label) in zip(axes, PANELS.items(), strict=True):
        for i, (task, own) in enumerate(table.groupby("task", sort=False)):
            seeds = own.assign(k=own["k"].fillna(0)).groupby("k")[name].agg(["mean", "min", "max"]).dropna()
            x = np.array([places[int(k) or None] for k in seeds.index]) + 0.06 * (i - 3)
            sparse = seeds.index > 0
            y = seeds["mean"].to_numpy()
            style = {"color": COLORS[i], "marker": "o", "markersize": 3, "linewidth": 1.2}
            ax.vlines(x, seeds["min"], seeds["max"], color=COLORS[i], linewidth=1.0, alpha=0.7)
            ax.plot(x[sparse], y[sparse], linestyle=STYLES[i], label=task, **style)
            ax.plot(x[~sparse], y[~sparse], **style)
        ax.set_xticks(list(places.values()), [*map(str, ks), "full"])
        ax.set_xlim(-0.4, len(ks) + 0.4)
        ax.set_xlabel("k")
        ax.set_ylabel(label)
    axes[2].set_yscale("log")
    axes[2].set_yticks([0.05, 0.1, 0.2, 0.5])
    plain_numbers(axes[2].yaxis)
    for ax in axes[2:]:
        ax.text(len(ks), 0.04, "drops\nno key", ha="center", fontsize=7, transform=ax.get_xaxis_transform())
    return finished(
        drawn,
        "Models trained with that k, two blocks of width 32; points: means of three seeds, bars: their range. A k "
        "that would keep all keys is left out. Separation and masks pool the queries of both layers, "
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
