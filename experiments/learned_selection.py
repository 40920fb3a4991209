"""Does the benefit of selection survive a learnt, cheap choice? The study that ``learned_selection.md`` registers.

    python experiments/learned_selection.py power
    python experiments/learned_selection.py run runs/learned
    python experiments/learned_selection.py collect runs/learned experiments/learned_selection
    python experiments/learned_selection.py judge experiments/learned_selection --out reports/learned_selection

``run`` writes a table for every run when it ends, and leaves out those that have one, there or among the collected
records. ``judge`` reads a task when all its registered runs are there.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from concentration import areas, runs_of, write
from fresh_seeds import refuse_used
from frozen import attention_of, share
from t_intervals import UNKNOWN, t_interval
from torch import Tensor

from semdiag.measuring.findings.resampling import Interval
from semdiag_models import AttentionCore, DivergedError, Encoder
from semdiag_models.sweep import SweepRun, read_sweep
from semdiag_models.train import Progress, Trainer

HERE = Path(__file__).parent
SWEEP = HERE / "learned_selection.toml"
FULL, TOP, INDEXER, BLOCKS = "full", "topk-5", "indexer-5-width-8", "moba-2"
HALF = 0.5  # of top-5's benefit: above it, most survives
K = 5  # largest weights that the kept weight is compared with
INPUTS = 100  # held-out inputs on which it is measured
RUN = ["task", "attention", "seed"]
# Mean advantage of top-5 over full attention, standard deviations of both: experiments/frozen.md
EARLIER = {"even-pairs": (1.67, 0.28, 0.15), "missing-duplicate": (0.58, 0.02, 0.22)}

Key = tuple[str, str, int]


def registered() -> dict[Key, SweepRun]:
    """Return the runs by task, attention and seed, in the order in which they are trained."""
    return {(run.training.task, attention_of(run), run.training.seed): run for run in read_sweep(SWEEP)}


def look(encoder: Encoder, tokens: Tensor) -> dict[str, float]:
    """Return the mean share of dense attention's weight on the kept keys, and on each query's five largest."""
    shares: dict[str, list[Tensor]] = {"kept_weight": [], "largest_weight": []}

    def collect(core: AttentionCore, inputs: tuple[Any, ...]) -> None:
        q, k, _, scale, valid, selected = inputs
        if valid is not None:
            raise ValueError("The study's tasks have no padding.")
        weights = (scale * (q @ k.mT)).softmax(-1)
        shares["largest_weight"].append(weights.topk(K, -1).values.sum(-1))
        if selected is None:
            shares["kept_weight"].append(weights.sum(-1))
            return
        on_keys = weights.gather(-1, selected.clamp(min=0)).masked_fill(selected < 0, 0)
        shares["kept_weight"].append(on_keys.sum(-1))

    cores = [encoder.attention(layer).core for layer in range(encoder.config.blocks)]
    hooks = [core.register_forward_pre_hook(collect) for core in cores]
    encoder.eval()
    try:
        with torch.no_grad():
            encoder(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: float(torch.cat([part.flatten() for part in parts]).mean()) for name, parts in shares.items()}


def train(run: SweepRun) -> pd.DataFrame:
    """Train a run; return a row for each epoch. One that diverges ends with an epoch without numbers."""
    rows: list[dict[str, float]] = []

    def after_epoch(progress: Progress) -> None:
        rows.append(dict(progress.row))

    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(run.model, run.training, torch.device("cpu"))
        try:
            trainer.run(after_epoch)
        except DivergedError:
            rows.append({"epoch": trainer.epoch + 1})
        else:
            rows[-1] |= look(trainer.encoder, trainer.holdout_split.tokens[:INPUTS])
    return pd.DataFrame(rows)


def file_of(folder: Path, key: Key) -> Path:
    """Return where a run's table is."""
    task, attention, seed = key
    return folder / f"{task}-{attention}-{seed}.parquet"


def collected(records: Path) -> pd.DataFrame:
    """Return the packed table; an empty one before the first collection."""
    packed = records / "epochs.parquet"
    return pd.read_parquet(packed) if packed.exists() else pd.DataFrame(columns=[*RUN, "epoch"])


def run_study(folder: Path, records: Path = HERE / "learned_selection") -> None:
    """Train the runs that have no table."""
    torch.set_num_threads(1)
    runs = registered()
    refuse_used({seed for *_, seed in runs}, "learned_selection")
    folder.mkdir(parents=True, exist_ok=True)
    through = set(runs_of(collected(records))[RUN].itertuples(index=False, name=None))
    for key, run in runs.items():
        file = file_of(folder, key)
        if file.exists() or key in through:
            continue
        clock = time.process_time()
        table = train(run)
        task, attention, seed = key
        seconds = time.process_time() - clock
        write(table.assign(task=task, attention=attention, seed=seed, core_seconds=seconds), file)
        print(time.strftime("%H:%M"), file.stem, f"has ended, {seconds:.0f} s of a core.", flush=True)


def collect(folder: Path, records: Path) -> None:
    """Join the tables of the runs that have ended, and those that are collected already, into one table."""
    records.mkdir(parents=True, exist_ok=True)
    tables = [pd.read_parquet(file) for key in registered() if (file := file_of(folder, key)).exists()]
    earlier = collected(records)
    if len(earlier):
        tables.append(earlier)
    table = pd.concat(tables).drop_duplicates([*RUN, "epoch"])
    write(table, records / "epochs.parquet")
    print(f"{records}: {len(runs_of(table))} of {len(registered())} runs.")


def reading(benefit: Interval, part: Interval) -> str:
    """Return what the share of top-5's benefit says of another choice.

    Example:
        >>> reading(Interval(1.6, 1.2, 2.0), Interval(0.9, 0.6, 1.1))
        'most of the benefit survives'
    """
    if not benefit.low > 0:
        return "top-5 has no clear benefit here"
    if part.low > HALF:
        return "most of the benefit survives"
    return "most of the benefit is lost" if part.high < HALF else "these runs cannot tell"


def shares(area: pd.DataFrame) -> pd.DataFrame:
    """Return, by task and choice, both advantages over full attention, their ratio, and the cost against top-5."""
    rows = []
    for task, losses in area.groupby("task", sort=False):
        for choice in (INDEXER, BLOCKS):
            three = losses[[FULL, TOP, choice]].dropna().to_numpy(np.float64)
            benefit = UNKNOWN
            advantage = UNKNOWN
            cost = UNKNOWN
            part = UNKNOWN
            if len(three) > 1:
                benefit = t_interval(three[:, 0] - three[:, 1])
                advantage = t_interval(three[:, 0] - three[:, 2])
                cost = t_interval(three[:, 2] - three[:, 1])
                part = share(three[:, 0] - three[:, 2], three[:, 0] - three[:, 1])
            intervals = {"benefit": benefit, "advantage": advantage, "cost": cost, "share": part}
            columns = [interval.columns(name) for name, interval in intervals.items()]
            row: dict[str, Any] = {"task": task, "choice": choice, "seeds": len(three)}
            for values in columns:
                row |= values
            rows.append({**row, "reading": reading(benefit, part)})
    return pd.DataFrame(rows)


def missing_runs(table: pd.DataFrame) -> dict[str, int]:
    """Return how many runs of each task have no table."""
    there = set(runs_of(table)[RUN].itertuples(index=False, name=None))
    missing = dict.fromkeys((task for task, *_ in registered()), 0)
    for key in registered():
        missing[key[0]] += key not in there
    return missing


def judge(records: Path, out: Path) -> None:
    """Write what the registration asks of the tasks of which all runs are there."""
    table = collected(records)
    missing = missing_runs(table)
    for task, count in missing.items():
        if count:
            print(f"{task}: {count} runs are missing, no reading. Go on: learned_selection.py run")
    complete = table[[not missing[task] for task in table["task"]]]
    if not len(complete):
        return
    answers = shares(areas(complete))
    last = complete.dropna(subset=["kept_weight"])
    columns = ["train_accuracy", "holdout_accuracy", "kept_weight", "largest_weight"]
    ends = last.groupby(["task", "attention"], sort=False)[columns].mean().reset_index()
    out.mkdir(parents=True, exist_ok=True)
    answers.to_csv(out / "shares.csv", index=False, float_format="%.6g")
    ends.to_csv(out / "ends.csv", index=False, float_format="%.6g")
    print(answers.to_string(index=False, float_format="{:.3f}".format))
    print(ends.to_string(index=False, float_format="{:.3f}".format))
    runs = runs_of(table)
    print(f"{len(runs)} runs have ended, {runs['core_seconds'].sum() / 3600:.2f} core hours.")


def power(task: str, survives: float, studies: int = 1000, seeds: int = 3) -> dict[str, float]:
    """Return how often each reading comes, of simulated studies: normal, independent, deviations of frozen.md.

    Args:
        task: even-pairs or missing-duplicate.
        survives: true share of the benefit that the choice keeps; it spreads over seeds as top-5 does.
        studies: number of them.
        seeds: number of seeds in each.
    """
    mean, spread_full, spread_top = EARLIER[task]
    generator = np.random.default_rng(0)
    counts: dict[str, float] = {}
    for _ in range(studies):
        full = generator.normal(mean, spread_full, seeds)
        benefit = full - generator.normal(0, spread_top, seeds)
        advantage = full - generator.normal((1 - survives) * mean, spread_top, seeds)
        text = reading(t_interval(benefit), share(advantage, benefit))
        counts[text] = counts.get(text, 0) + 1 / studies
    return counts


def show_power() -> None:
    """Print the table of the registration."""
    words = ("most of the benefit survives", "most of the benefit is lost")
    words += ("these runs cannot tell", "top-5 has no clear benefit here")
    print("| task | true share |", " | ".join(words), "|")
    print("|---|---|---|---|---|---|")
    for task in EARLIER:
        for survives in (0.0, 0.25, 0.75, 1.0):
            chances = power(task, survives)
            cells = " | ".join(f"{chances.get(word, 0):.0%}" for word in words)
            print(f"| {task} | {survives:g} | {cells} |")


def main() -> None:
    """Show the power, run, collect or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("power")
    runs = parts.add_parser("run")
    runs.add_argument("folder", type=Path)
    collecting = parts.add_parser("collect")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("records", type=Path)
    judging = parts.add_parser("judge")
    judging.add_argument("records", type=Path)
    judging.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.part == "power":
        show_power()
    elif options.part == "run":
        run_study(options.folder)
    elif options.part == "collect":
        collect(options.folder, options.records)
    else:
        judge(options.records, options.out)


if __name__ == "__main__":
    main()
