"""Is the loss flatter around top-5 attention than around full attention, at the same training loss? Exploratory.

    semdiag sweep experiments/lipschitz.toml --in-a-step 10
    python experiments/lipschitz_pairs.py --out reports/lipschitz

Every pair of runs (one task, one seed) is compared with ``semdiag lipschitz --against`` at three stages: at the
initialisation, at matched loss, and when training ended. Matched is the snapshot whose mean training loss of its
epoch is nearest to half of ln(classes), a level that both reach; where a loss falls through it between two
snapshots the two may still be far apart, and such a pair (by a factor above 1.25) is left out of that stage and
named. Ratios are those of secants of the loss, top-5 over full attention. Tasks are the unit of the summary:
logarithms are averaged over a task's seeds first.
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
from scipy import stats

from semdiag_models.sweep import SweepRun, read_sweep

SWEEP = Path(__file__).parent / "lipschitz.toml"
APART = 1.25  # losses by more than this factor are not matched
OPTIONS = ("--samples", "50", "--draws", "5", "--figures", "none", "--quiet", "--json")


def matched_epoch(history: pd.DataFrame, snapshots: list[int], classes: int) -> int:
    """The snapshot whose epoch's training loss is nearest to half of ln(classes).

    Example:
        >>> history = pd.DataFrame({"epoch": [1, 2, 3], "train_loss": [0.7, 0.36, 0.1]})
        >>> matched_epoch(history, [1, 2, 3], 2)
        2
    """
    losses = history.set_index("epoch")["train_loss"].loc[snapshots]
    return int((losses - math.log(classes) / 2).abs().idxmin())


def stages(run: SweepRun, folder: Path) -> dict[str, tuple[Path, float]]:
    """The file of each stage, and the training loss of its epoch."""
    history = pd.read_csv(folder / "history.csv")
    losses = history.set_index("epoch")["train_loss"]
    matched = matched_epoch(history, list(run.training.snapshots), run.model.classes)
    return {
        "initialisation": (folder / "epoch-0.pt", math.nan),
        "matched loss": (folder / f"epoch-{matched}.pt", losses[matched]),
        "end": (folder / "last.pt", losses.iloc[-1]),
    }


def secant_ratios(other: Path, full: Path) -> pd.DataFrame:
    """Radius, percentile, ratio and interval, as ``semdiag lipschitz --against`` gives them."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "semdiag", "lipschitz", str(other), "--against", str(full), *OPTIONS]
        done = subprocess.run([*command, "--out", f"{out}/page"], check=True, capture_output=True, text=True)
    (pair,) = json.loads(done.stdout)["pairs"]
    return pd.DataFrame(pair["ratios"])


def unmatched(ratios: pd.DataFrame) -> pd.Series:
    """Which rows are of the matched stage with losses that are not."""
    apart = np.log(ratios["loss_topk"] / ratios["loss_full"]).abs() > math.log(APART)
    return (ratios["stage"] == "matched loss") & apart


def summary(ratios: pd.DataFrame) -> pd.DataFrame:
    """By stage, radius and percentile: the ratio over tasks with a 95% t-interval, and how many pairs are clear.

    Args:
        ratios: of all pairs: ``stage``, ``task``, ``seed``, ``radius``, ``percentile``, ``estimate``, ``low`` and
            ``high``.
    """
    rows = []
    for key, own in ratios.groupby(["stage", "radius", "percentile"], sort=False):
        by_task = np.log(own["estimate"]).groupby(own["task"]).mean()
        centre, error = by_task.mean(), by_task.sem()
        half = stats.t.ppf(0.975, len(by_task) - 1) * error
        rows.append(
            dict(zip(("stage", "radius", "percentile"), key, strict=True))
            | {"ratio": math.exp(centre), "low": math.exp(centre - half), "high": math.exp(centre + half)}
            | {"tasks": len(by_task), "pairs": len(own)}
            | {"flatter": int((own["high"] < 1).sum()), "steeper": int((own["low"] > 1).sum())}
        )
    return pd.DataFrame(rows)


def main() -> None:
    """Compare all pairs, and write and print what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path("runs/lipschitz"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    by_pair: dict[tuple[str, int], dict[str, SweepRun]] = {}
    for run in read_sweep(SWEEP):
        by_pair.setdefault((run.training.task, run.training.seed), {})[run.model.attention] = run
    tables = []
    for (task, seed), runs in by_pair.items():
        full, topk = (stages(runs[kind], arguments.runs / runs[kind].name) for kind in ("full", "topk"))
        for stage, (path, loss) in topk.items():
            own = secant_ratios(path, full[stage][0])
            facts = {"task": task, "seed": seed, "stage": stage, "loss_topk": loss, "loss_full": full[stage][1]}
            tables.append(own.assign(**facts)[[*facts, *own.columns]])
            print(task, seed, stage, path.name, full[stage][0].name, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    ratios = pd.concat(tables)
    ratios.to_csv(arguments.out / "ratios.csv", index=False, float_format="%.6g")
    left_out = ratios.loc[unmatched(ratios), ["task", "seed"]].drop_duplicates()
    print(f"Left out at matched loss:\n{left_out.to_string(index=False, header=False)}")
    found = summary(ratios[~unmatched(ratios)])
    found.to_csv(arguments.out / "summary.csv", index=False, float_format="%.6g")
    print(found[found["percentile"] == 50].to_string(index=False, float_format=lambda x: f"{x:.3g}"))


if __name__ == "__main__":
    main()
