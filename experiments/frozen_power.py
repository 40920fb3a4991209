"""How much the study of frozen queries and keys can tell: from the spread over seeds in records that are there.

    python experiments/frozen_power.py

Of trained full and top-5 attention there are three seeds a task (experiments/speed). No record has frozen runs:
theirs are taken to spread as those of trained top-5 do, and every run's deviation to be independent and normal.
"""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
from frozen import FULL, HALF, TOPK, attention_of, share
from pack_records import read_history
from t_intervals import t_interval

from semdiag_models.sweep import read_sweep

HERE = Path(__file__).parent
SEEDS, STUDIES = 5, 2000
SHARES = (0.0, 0.15, 0.4, 0.7, 0.85, 1.0)


def seen() -> dict[tuple[str, str], list[float]]:
    """Loss areas of the trained runs of experiments/speed, by task and attention."""
    found = defaultdict(list)
    for run in read_sweep(HERE / "speed.toml"):
        history = read_history(HERE / "speed", run)
        if history is not None and attention_of(run) in (FULL, TOPK):
            area = math.log(float(np.mean(history["train_loss"])))
            found[run.training.task_label, attention_of(run)].append(area)
    return found


def power(advantage: float, full: float, other: float, true: float, rng: np.random.Generator) -> dict[str, float]:
    """How many simulated studies form a share, hold the true one, and have their interval above or below bounds.

    Args:
        advantage: of trained attention over full, in ln of mean losses.
        full: standard deviation of full attention's loss area over seeds.
        other: of the other attention's, trained and frozen alike.
        true: share of the advantage that survives.
        rng: what draws.
    """
    counts: dict[str, int] = defaultdict(int)
    for _ in range(STUDIES):
        reference = full * rng.standard_normal(SEEDS)
        trained = advantage + reference + other * rng.standard_normal(SEEDS)
        frozen = true * advantage + reference + other * rng.standard_normal(SEEDS)
        found = share(frozen, trained)
        counts["formed"] += t_interval(trained).low > 0
        counts["holds"] += found.low <= true <= found.high
        for bound in (0.7, HALF):
            counts[f"> {bound}"] += found.low > bound
        for bound in (HALF, 0.4):
            counts[f"< {bound}"] += found.high < bound
    return {name: count / STUDIES for name, count in counts.items()}


def main() -> None:
    """Print spread and power, task by task."""
    areas, rng, rows = seen(), np.random.default_rng(0), []
    for task in dict.fromkeys(task for task, _ in areas):
        full, other = np.array(areas[task, FULL]), np.array(areas[task, TOPK])
        advantage = float(np.mean(full) - np.mean(other))
        deviations = float(np.std(full, ddof=1)), float(np.std(other, ddof=1))
        known = {"task": task, "advantage": advantage, "sd_full": deviations[0], "sd_top5": deviations[1]}
        print(pd.DataFrame([known]).to_string(index=False, header=not rows, float_format="%.3f"))
        if advantage > 0:
            rows += [{"task": task, "true": true} | power(advantage, *deviations, true, rng) for true in SHARES]
    print(f"\n{pd.DataFrame(rows).to_string(index=False, float_format='%.2f')}")


if __name__ == "__main__":
    main()
