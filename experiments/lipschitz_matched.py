"""Is the loss flatter around top-5 attention at matched loss on even-pairs, which it learns sooner? Exploratory.

    python experiments/lipschitz_matched.py --out reports/lipschitz

The runs of experiments/lipschitz.toml with epochs of 10 steps instead of 100, so that both kinds of attention have
an epoch at half of ln(classes), and as many epochs as that takes. Interrupted, it goes on where it was.
"""

import argparse
import math
import shutil
from pathlib import Path

import pandas as pd
import torch
from lipschitz_pairs import secant_ratios, summary, unmatched

from semdiag_models import configure, find_task, open_run, read_checkpoint, run_name, train_run

TASKS = ("even-pairs",)
SEEDS = 153476998, 235510766, 205084180
STEPS = 10  # in an epoch; the learning rate falls by as much in 100 steps as in lipschitz.toml
SETTINGS = {
    "length": 20, "blocks": 2, "width": 32, "mlp_width": 32, "head_width": 32, "train_samples": 25 * STEPS,
    "holdout_samples": 50, "fresh_samples": True, "epochs": 2000, "until": 0.95,
    "learning_rate_decay": 0.9995 ** (STEPS / 100),
}  # fmt: skip


def matched(folder: Path, task: str, attention: dict[str, object], seed: int) -> tuple[Path, float]:
    """Train a run, and return its snapshot nearest to half of ln(classes) with its training loss."""
    model, training = configure(find_task(task), {**SETTINGS, **attention, "seed": seed})
    folder = folder / run_name(model, training)
    begun = (folder / "last.pt").exists()
    trainer = open_run(folder, model, training, torch.device("cpu"), resume=begun, overwrite=not begun)
    level = math.log(model.classes) / 2

    def keep_nearest(_: object) -> None:
        distances = [abs(loss - level) for loss in trainer.history["train_loss"]]
        if distances[-1] == min(distances):
            shutil.copy(folder / "last.pt", folder / "matched.pt")

    train_run(folder, trainer, {}, keep_nearest)
    saved = read_checkpoint(folder / "matched.pt")
    return folder / "matched.pt", saved.history["train_loss"][-1]


def main() -> None:
    """Train and compare all pairs; write and print what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path("runs/lipschitz-matched"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {"topk": {"attention": "topk", "k": 5}, "full": {"attention": "full"}}
    pairs = {  # all are trained before any is compared
        (task, seed): {kind: matched(arguments.runs, task, chosen, seed) for kind, chosen in kinds.items()}
        for task in TASKS
        for seed in SEEDS
    }
    tables = []
    for (task, seed), snapshots in pairs.items():
        (topk, loss_topk), (full, loss_full) = snapshots["topk"], snapshots["full"]
        facts = {
            "task": task,
            "seed": seed,
            "stage": "matched loss",
            "loss_topk": loss_topk,
            "loss_full": loss_full,
        }
        tables.append(secant_ratios(topk, full).assign(**facts))
        print(task, seed, f"losses {loss_topk:.3f} and {loss_full:.3f}", flush=True)
    ratios = pd.concat(tables)
    first = ["task", "seed", "stage", "loss_topk", "loss_full"]
    ratios = ratios[[*first, *(name for name in ratios if name not in first)]]
    ratios.to_csv(arguments.out / "matched.csv", index=False, float_format="%.6g")
    print(f"Pairs left out: {ratios[unmatched(ratios)].groupby(['task', 'seed']).ngroups}")
    for task, rows in ratios[~unmatched(ratios)].groupby("task"):
        # within one task, seeds are the unit
        found = summary(rows.assign(task=rows["seed"])).query("percentile == 50")
        print(task, found.to_string(index=False, float_format=lambda x: f"{x:.3g}"), sep="\n")


if __name__ == "__main__":
    main()
