"""Loss surfaces of a reference pair, and sharpness at matched training loss, as landscape.md registers them.

    semdiag sweep experiments/landscape.toml --in-a-step 3
    python experiments/landscape.py --runs runs/landscape --out reports/landscape

Writes ``cells.csv``, ``planes.csv``, ``sharpness.csv``, ``summary.csv`` and the figure ``surfaces``.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from lipschitz_pairs import APART, matched_epoch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor

from semdiag.capturing.loading import load
from semdiag.mathematics.planes import random_direction
from semdiag.measuring.encoders.weights import MovableEncoder
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import inputs_of
from semdiag.presenting.drawing.style import finished, paper_style, save_figure
from semdiag.questions.landscape.measure import LandscapePlan, landscape_table
from semdiag_models.sweep import SweepRun, read_sweep

HERE = Path(__file__).parent
SWEEP = HERE / "landscape.toml"
PAIR = {"full": "even-pairs-full-seed-153476998", "top-5": "even-pairs-topk-5-seed-153476998"}
STAGES = {"initialisation": "epoch-0.pt", "end": "last.pt"}
PLANES, CELLS, SAMPLES = 3, 15, 200
WITHIN = (0.25, 0.5, 1.0)
RADII, DIRECTIONS = (0.02, 0.05, 0.1), 30


def held_out(path: Path, samples: int) -> tuple[Tensor, Tensor]:
    """The first held-out samples of a run, and their labels."""
    batches, labels, _ = inputs_of(load(path), Conditions(samples=samples))
    assert labels is not None
    return torch.cat(batches), labels


def surfaces(checkpoints: Path) -> pd.DataFrame:
    """Every evaluated cell of the reference pair: attention, stage, plane, x, y, place and loss."""
    parts = []
    for attention, name in PAIR.items():
        for stage, file in STAGES.items():
            path = checkpoints / name / file
            plan = LandscapePlan(planes=PLANES, grid=CELLS)
            cells = landscape_table(load(path), *held_out(path, SAMPLES), plan=plan, seed=0)
            parts.append(cells.assign(attention=attention, stage=stage))
            print(attention, stage, flush=True)
    columns = ["attention", "stage", "plane", "x", "y", "place", "loss", "accuracy"]
    return pd.concat(parts, ignore_index=True)[columns]


def plane_levels(cells: pd.DataFrame) -> pd.DataFrame:
    """Per stage, plane and radius: the mean ln loss of both attentions and their difference."""
    grid = cells[cells["place"] == "grid"].assign(away=np.hypot(cells["x"], cells["y"]))
    rows = []
    for within in WITHIN:
        own = grid[(grid["away"] > 1e-9) & (grid["away"] <= within + 1e-9)]
        level = np.log(own["loss"]).groupby([own["stage"], own["plane"], own["attention"]]).mean().unstack()
        level = level.assign(radius=within, difference=level["top-5"] - level["full"])
        rows.append(level.reset_index())
    return pd.concat(rows, ignore_index=True)


def interval(values: "pd.Series[float]") -> dict[str, float]:
    """Mean and 95% t-interval; no interval of a single value.

    Example:
        >>> found = interval(pd.Series([1.0, 2.0, 3.0]))
        >>> float(found["mean"]), round(float(found["high"] - found["mean"]), 3)
        (2.0, 2.484)
    """
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem() if len(values) > 1 else math.nan
    return {"mean": values.mean(), "low": values.mean() - half, "high": values.mean() + half}


def increase(moved: MovableEncoder, tokens: Tensor, labels: Tensor, radius: float, seed: int) -> float:
    """The mean over random directions of (L(θ + rd) + L(θ − rd)) / 2 − L(θ), nats."""
    generator = torch.Generator().manual_seed(seed)
    moved.move_to(moved.origin)
    here, _ = moved.loss_and_accuracy(tokens, labels)
    found = []
    for _ in range(DIRECTIONS):
        step = radius * random_direction(moved.origin, moved.slices(), generator)
        for sign in (1, -1):
            moved.move_to(moved.origin + sign * step)
            found.append(moved.loss_and_accuracy(tokens, labels)[0])
    return float(np.mean(found)) - here


def sharpness(runs: Path) -> pd.DataFrame:
    """Task, seed, attention, epoch and training loss of the matched snapshot, radius and increase."""
    rows = []
    for run in read_sweep(SWEEP):
        folder = runs / run.name
        history = pd.read_csv(folder / "history.csv")
        epoch = matched_epoch(history, list(run.training.snapshots), run.model.classes)
        path = folder / f"epoch-{epoch}.pt"
        facts = _facts(run) | {"epoch": epoch}
        facts["train_loss"] = history.set_index("epoch")["train_loss"].loc[epoch]
        moved, (tokens, labels) = MovableEncoder(load(path).encoder), held_out(path, 500)
        for radius in RADII:
            found = increase(moved, tokens, labels, radius, run.training.seed)
            rows.append({**facts, "radius": radius, "increase": found})
        print(*facts.values(), flush=True)
    return pd.DataFrame(rows)


def _facts(run: SweepRun) -> dict[str, object]:
    attention = "full" if run.model.attention == "full" else "top-5"
    return {"task": run.training.task, "seed": run.training.seed, "attention": attention}


def ratios(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The ln ratio of top-5 to full by task, radius and seed, and the pairs that are left out, with the reason."""
    rows, left_out = [], []
    for (task, seed, radius), own in table.groupby(["task", "seed", "radius"], sort=False):
        pair = own.set_index("attention")
        losses, rises = pair["train_loss"], pair["increase"]
        if abs(math.log(losses["top-5"] / losses["full"])) > math.log(APART):
            left_out.append(
                f"{task}, seed {seed}: losses are not matched ({losses['top-5']:.3g}, {losses['full']:.3g})"
            )
        elif rises.min() <= 0:
            left_out.append(f"{task}, seed {seed}, radius {radius}: the loss does not rise")
        else:
            ratio = math.log(rises["top-5"] / rises["full"])
            rows.append({"task": task, "seed": seed, "radius": radius, "ln_ratio": ratio})
    return pd.DataFrame(rows, columns=["task", "seed", "radius", "ln_ratio"]), list(dict.fromkeys(left_out))


@paper_style
def draw(cells: pd.DataFrame) -> Figure:
    """All planes at one scale of the loss: stages down, planes across, full attention left and top-5 right."""
    grid = cells[cells["place"] == "grid"]
    columns = [(attention, plane) for attention in PAIR for plane in range(PLANES)]
    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    axes = figure.subplots(len(STAGES), len(columns), sharex=True, sharey=True)
    low, high = np.log10(grid["loss"].clip(lower=1e-6)).min(), np.log10(grid["loss"]).max()
    for down, stage in enumerate(STAGES):
        for across, (attention, plane) in enumerate(columns):
            ax = axes[down, across]
            own = grid[(grid["attention"] == attention) & (grid["stage"] == stage) & (grid["plane"] == plane)]
            table = own.pivot(index="y", columns="x", values="loss").clip(lower=1e-6)
            picture = ax.pcolormesh(
                table.columns, table.index, np.log10(table), vmin=low, vmax=high, cmap="Blues_r", rasterized=True
            )
            ax.plot(0, 0, marker="+", color="black" if stage == "initialisation" else "white", markersize=5)
            ax.set_aspect("equal")
            if down == 0:
                ax.set_title(f"{attention}, {plane + 1}", fontsize=8)
        axes[down, 0].set_ylabel(stage, fontsize=8)
    figure.colorbar(picture, ax=axes, label="log₁₀ loss (nats)", shrink=0.8)
    return finished(
        figure, "Even-pairs, one pair of runs, three random planes each, 200 samples. +: the checkpoint."
    )


def main() -> None:
    """Measure, write the tables and the figure, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/landscape"))
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    cells = surfaces(HERE.parent / "checkpoints")
    planes, sharp = plane_levels(cells), sharpness(chosen.runs)
    pairs, left_out = ratios(sharp)
    said = [
        {"outcome": outcome, "where": where, "radius": radius, "n": len(own), **interval(own[value])}
        for outcome, table, place, value in (
            ("ln loss, top-5 less full", planes, "stage", "difference"),
            ("ln ratio of sharpness", pairs, "task", "ln_ratio"),
        )
        for (where, radius), own in table.groupby([place, "radius"], sort=False)
    ]
    summary = pd.DataFrame(said)
    chosen.out.mkdir(parents=True, exist_ok=True)
    tables = {"cells": cells, "planes": planes, "sharpness": sharp, "summary": summary}
    for name, table in tables.items():
        table.to_csv(chosen.out / f"{name}.csv", index=False, float_format="%.6g")
    save_figure(draw(cells), chosen.out / "surfaces", ("png", "svg"))
    print(summary.to_string(index=False, float_format=lambda x: f"{x:.3g}"))
    print("Left out:", "; ".join(left_out) or "none")


if __name__ == "__main__":
    main()
