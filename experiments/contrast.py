"""Mask or contrast at the paper's size? Trains and judges the study that ``contrast.md`` registers.

    python experiments/contrast.py power
    python experiments/contrast.py run runs/contrast [--task TASK]
    python experiments/contrast.py collect runs/contrast experiments/contrast
    python experiments/contrast.py judge experiments/contrast --out reports/contrast

``run`` goes on where it was stopped, in the middle of a run, too. ``collect`` packs the records of finished runs.
``judge`` compares two attentions on a task when all their registered runs are there.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from fresh_seeds import refuse_used
from frozen import attention_of
from numpy.typing import NDArray
from pack_records import SCHEMA, pack, read_history
from scipy import stats
from t_intervals import UNKNOWN, t_interval

from semdiag.capturing.loading import load
from semdiag.commands.sweep_results import result
from semdiag.measuring.findings.resampling import Interval
from semdiag.measuring.measure import Conditions
from semdiag_files import InputError
from semdiag_models import DivergedError, Encoder, read_checkpoint
from semdiag_models.run_folder import open_run, train_run
from semdiag_models.sweep import SweepRun, identity, read_sweep
from semdiag_models.tasks import find_task
from semdiag_models.train import ended

HERE = Path(__file__).parent
SWEEP = HERE / "contrast.toml"
UNTIL = 0.99  # exact training accuracy at which runs stop
LITTLE = math.log(1.25)  # areas that differ by less than a quarter
APART = 1.25  # training losses by more than this factor are not matched
FASTER, FACTOR = "full-faster-queries-and-keys", 4.0  # the control, and the factor on the rate of W_q and W_k
FULL, SHARP, TOP, SHARP_TOP = "full", "full-times-4", "topk-5", "topk-5-times-4"
PRIMARY = SHARP, TOP, SHARP_TOP, FULL
TURNS = {
    SHARP: 0,
    TOP: 0,
    SHARP_TOP: 1,
    FULL: 2,
    "full-times-2": 3,
    "full-times-8": 3,
}  # in which order they are run
COMPARISONS = (  # the first is the primary one
    (SHARP, TOP),
    (SHARP_TOP, SHARP),
    (SHARP, FULL),
    (TOP, FULL),
    ("full-times-2", FULL),
    ("full-times-8", FULL),
    (FASTER, FULL),
    (FASTER, SHARP),
)
CANDIDATES = "dispersion", "xi_sound", "xi_paper", "lambda_sound", "lambda_paper"
SAMPLES = 50  # held-out inputs on which they are measured


def registered() -> list[tuple[str, str, int, SweepRun]]:
    """Return task, attention, seed and run of the whole study, in the order in which they are trained."""
    runs = [(run.training.task, attention_of(run), run.training.seed, run) for run in read_sweep(SWEEP)]
    tasks = list(dict.fromkeys(task for task, *_ in runs))
    runs.sort(key=lambda each: (each[1] not in PRIMARY, tasks.index(each[0]), TURNS[each[1]]))
    control = [
        (task, FASTER, seed, replace(run, name=f"{run.name}-faster-queries-and-keys"))
        for task, attention, seed, run in runs
        if (task, attention) == ("even-pairs", FULL)
    ]
    return [*runs, *control]


class FasterQueriesAndKeys:
    """Multiply every step of W_q, W_k and their biases by a factor: called after each step of SGD."""

    def __init__(self, encoder: Encoder, factor: float) -> None:
        self.factor = factor
        inner = encoder.config.heads * encoder.config.head_width
        layers = [encoder.attention(i).qkv for i in range(encoder.config.blocks)]
        self.rows = [p.detach()[: 2 * inner] for layer in layers for p in (layer.weight, layer.bias)]
        self.before = [rows.clone() for rows in self.rows]

    def __call__(self) -> None:
        """Move on from where the step began."""
        for rows, before in zip(self.rows, self.before, strict=True):
            rows.copy_(before + self.factor * (rows - before))
            before.copy_(rows)


def train(folder: Path, run: SweepRun, faster: bool) -> None:
    """Train a run to its end, from where it stands.

    Raises:
        InputError: if its folder is damaged, or holds another run; it names the file.
        DivergedError: if its loss is no longer a number.
    """
    begun = (folder / "last.pt").exists()
    if begun:
        saved = read_checkpoint(folder / "last.pt")
        if identity(saved.model, saved.training) != identity(run.model, run.training):
            raise InputError(f"{folder} holds a run of another configuration. Move it away.")
        if ended(saved.history, run.training):
            return
    trainer = open_run(folder, run.model, run.training, torch.device("cpu"), resume=begun, overwrite=not begun)
    after_step = FasterQueriesAndKeys(trainer.encoder, FACTOR) if faster else lambda: None
    train_run(folder, trainer, {"command": "python experiments/contrast.py run"}, after_batch=after_step)


def theory_of(folder: Path) -> pd.DataFrame:
    """Measure ln of δ, ξ and λ at the initialisation and at the end of a run."""
    from predictors import candidates_at

    rows = []
    for moment, name in (("before", "epoch-0.pt"), ("after", "last.pt")):
        values = candidates_at(load(folder / name), Conditions(samples=SAMPLES), CANDIDATES)
        rows += [{"moment": moment, "candidate": key, "ln_value": value} for key, value in values.items()]
    return pd.DataFrame(rows)


def waiting(folder: Path, records: Path) -> list[tuple[str, str, int, SweepRun]]:
    """Return the runs that have neither ended nor diverged, in the folder or by the records of another machine."""
    through = read(records).keys() | diverged_in(records)
    files = ("theory.csv", "diverged.txt")
    return [
        each
        for each in registered()
        if each[:3] not in through and not any((folder / each[3].name / file).exists() for file in files)
    ]


def run_study(folder: Path, task: str | None) -> None:
    """Train what has not ended, and measure what has."""
    torch.set_num_threads(1)
    refuse_used({seed for _, _, seed, _ in registered()}, "contrast")
    for name, attention, seed, run in waiting(folder, HERE / "contrast"):
        place = folder / run.name
        if task not in (None, name):
            continue
        try:
            train(place, run, attention == FASTER)
        except DivergedError as error:
            (place / "diverged.txt").write_text(f"{error}\n", encoding="utf-8")
            continue
        theory = theory_of(place).assign(task=name, attention=attention, seed=seed)
        theory.to_csv(place / "theory.csv", index=False, float_format="%.7g")
        print(name, attention, seed, "has ended.", flush=True)


def diverged_in(records: Path) -> set[tuple[str, str, int]]:
    """Return the runs whose losses were no numbers: task, attention, seed."""
    file = records / "diverged.csv"
    return set(pd.read_csv(file).itertuples(index=False, name=None)) if file.exists() else set()


def collect(folder: Path, records: Path) -> None:
    """Pack the records of the runs that have ended, and join their tables of δ, ξ and λ."""
    records.mkdir(parents=True, exist_ok=True)
    theory = []
    diverged = diverged_in(records)
    for name, attention, seed, run in registered():
        place = folder / run.name
        if (place / "theory.csv").exists():
            result(run, place, UNTIL, records=records)
            theory.append(pd.read_csv(place / "theory.csv"))
        elif (place / "diverged.txt").exists():
            diverged.add((name, attention, seed))
    earlier = records / "theory.csv"
    if earlier.exists():
        theory.append(pd.read_csv(earlier))
    keys = ["task", "attention", "seed", "moment", "candidate"]
    pd.concat(theory).drop_duplicates(keys).sort_values(keys).to_csv(earlier, index=False)
    table = pd.DataFrame(sorted(diverged), columns=["task", "attention", "seed"])
    table.to_csv(records / "diverged.csv", index=False)
    print(f"{records}: {pack(records, SCHEMA)} runs, {len(diverged)} diverged.")


def area(losses: NDArray[np.float64], classes: int) -> float:
    """Integrate the training loss over epochs, nats: trapezoids from ln(classes) at epoch 0 to the last epoch.

    Example:
        >>> round(area(np.array([0.5, 0.1]), 2), 3)  # (0.693 + 0.5) / 2 + (0.5 + 0.1) / 2
        0.897
    """
    curve = np.concatenate([[math.log(classes)], losses])
    return float((curve[1:] + curve[:-1]).sum() / 2)


Key = tuple[str, str, int]


def read(records: Path) -> dict[Key, dict[str, NDArray[np.float64]]]:
    """Return the histories of all runs that have ended, by task, attention and seed."""
    found = {}
    for task, attention, seed, run in registered():
        history = read_history(records, run)
        if history is not None and ended(history, run.training):
            found[task, attention, seed] = {name: np.array(column) for name, column in history.items()}
    return found


def outcome_of(history: dict[str, NDArray[np.float64]], task: str) -> dict[str, float]:
    """Return what is compared of a run: its area and where it ended."""
    reached = history["train_accuracy"] >= UNTIL
    return {
        "ln_area": math.log(area(history["train_loss"], find_task(task).classes)),
        "epochs": float(len(reached)),
        "stopped": float(reached[-1]),
        "epochs_to_95": _first(history["train_accuracy"] >= 0.95),
        "holdout_accuracy": float(history["holdout_accuracy"][-1]),
        "holdout_loss": float(history["holdout_loss"][-1]),
        "seconds": float(history["seconds"].sum()),
    }


def _first(reached: NDArray[np.bool_]) -> float:
    return float(reached.argmax() + 1) if reached.any() else math.nan


def compare(one: dict[str, Any], other: dict[str, Any], task: str) -> dict[str, float]:
    """Return the differences of a pair of runs of the same seed, the first less the second."""
    classes = find_task(task).classes
    areas = [math.log(area(run["train_loss"], classes)) for run in (one, other)]
    both = min(len(one["epoch"]), len(other["epoch"]))
    common = [math.log(float(run["train_loss"][:both].mean())) for run in (one, other)]
    ends = [run["holdout_accuracy"][-1] for run in (one, other)]
    return {
        "ln_area": areas[0] - areas[1],
        "ln_common": common[0] - common[1],
        "holdout_accuracy": float(ends[0] - ends[1]),
        "holdout_loss_at_matched_loss": _at_matched_loss(one, other, classes),
    }


def _at_matched_loss(one: dict[str, Any], other: dict[str, Any], classes: int) -> float:
    """Return the difference of held-out losses where both training losses are nearest to half of ln(classes)."""
    at = [int(np.abs(run["train_loss"] - math.log(classes) / 2).argmin()) for run in (one, other)]
    reached = [run["train_loss"][epoch] for run, epoch in zip((one, other), at, strict=True)]
    if abs(math.log(reached[0] / reached[1])) > math.log(APART):
        return math.nan
    return float(one["holdout_loss"][at[0]] - other["holdout_loss"][at[1]])


def said(found: Interval) -> str:
    """Return what the interval of an area, full × 4 less top-5, says.

    Example:
        >>> said(Interval(-0.3, -0.5, -0.1))
        'the mask is not needed for the head start'
    """
    parts = ["the mask is not needed for the head start"] if found.high < LITTLE else []
    parts += ["selection adds something"] if found.low > 0 else []
    return "; ".join(parts) or "these runs cannot tell"


COLUMNS = "task", "attention", "less", "quantity", "pairs", "estimate", "low", "high", "seeds"


def differences(runs: dict[Key, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare the attentions on each task, seed by seed: a row for each pair and quantity."""
    for task in dict.fromkeys(task for task, _, _ in runs):
        seeds = sorted({seed for name, _, seed in runs if name == task})
        for first, second in COMPARISONS:
            pairs = [s for s in seeds if (task, first, s) in runs and (task, second, s) in runs]
            found = [compare(runs[task, first, s], runs[task, second, s], task) for s in pairs]
            for quantity in found[0] if found else ():
                values = np.array([each[quantity] for each in found])
                known = values[np.isfinite(values)]
                mean = t_interval(known) if len(known) > 1 else UNKNOWN
                named = " ".join(map(str, np.array(pairs)[np.isfinite(values)]))
                numbers = (len(known), mean.estimate, mean.low, mean.high, named)
                yield dict(zip(COLUMNS, (task, first, second, quantity, *numbers), strict=True))


def missing_runs(records: Path, runs: dict[Key, Any]) -> dict[tuple[str, str], int]:
    """Return how many runs of each task and attention have neither ended nor diverged."""
    diverged = diverged_in(records)
    missing = dict.fromkeys(((task, attention) for task, attention, *_ in registered()), 0)
    for task, attention, seed, _ in registered():
        if (task, attention, seed) not in runs and (task, attention, seed) not in diverged:
            missing[task, attention] += 1
    return missing


def judge(records: Path, out: Path) -> None:
    """Write what the registration asks of the attentions of which all runs of a task are there."""
    runs = read(records)
    missing = missing_runs(records, runs)
    for (task, attention), count in missing.items():
        if count:
            print(f"{task}, {attention}: {count} runs are missing, no comparison. Go on: contrast.py run")
    whole = {key: run for key, run in runs.items() if not missing[key[:2]]}
    table = pd.DataFrame(differences(whole), columns=list(COLUMNS))
    if not len(table):
        return
    out.mkdir(parents=True, exist_ok=True)
    outcomes = [
        dict(zip(("task", "attention", "seed"), key, strict=True)) | outcome_of(run, key[0])
        for key, run in whole.items()
    ]
    pd.DataFrame(outcomes).to_csv(out / "runs.csv", index=False, float_format="%.6g")
    table.to_csv(out / "differences.csv", index=False, float_format="%.6g")
    primary = table.query("attention == @SHARP and less == @TOP and quantity == 'ln_area'")
    verdicts = [said(Interval(*row)) for row in primary[["estimate", "low", "high"]].to_numpy()]
    answers = primary.drop(columns=["attention", "less", "quantity"]).assign(verdict=verdicts)
    answers.to_csv(out / "verdicts.csv", index=False, float_format="%.6g")
    print(answers.to_string(index=False, float_format="{:.3f}".format))
    hours = sum(float(run["seconds"].sum()) for run in runs.values()) / 3600
    print(f"{len(runs)} of {len(registered())} runs have ended, {hours:.2f} hours by their clocks.")


def power(mean: float, deviation: float, seeds: int) -> tuple[float, float]:
    """Return the chances that the interval's upper end is below ln 1.25, and that its lower end is above 0.

    Args:
        mean: true mean of the differences.
        deviation: their standard deviation over seeds; they are normal and independent.
        seeds: how many.

    Example:
        >>> [round(chance, 3) for chance in power(0.0, 0.3, 8)]  # of the second, the level of the test
        [0.443, 0.025]
    """
    error, bound = deviation / math.sqrt(seeds), stats.t.ppf(0.975, seeds - 1)
    below = stats.nct.cdf(-bound, seeds - 1, (mean - LITTLE) / error)
    above = stats.nct.sf(bound, seeds - 1, mean / error)
    return float(below), float(above)


def show_power() -> None:
    """Print the table of the registration."""
    print("| true ln ratio | sd over seeds | seeds | not needed | adds something |")
    print("|---|---|---|---|---|")
    for mean in (math.log(0.72), -0.1, 0.0, 0.3, 0.6):
        for deviation in (0.3, 0.6):
            for seeds in (8, 5, 3):
                chances = power(mean, deviation, seeds)
                told = " | ".join(f"{chance:.0%}" for chance in chances)
                print(f"| {mean:.2f} | {deviation} | {seeds} | {told} |")


def main() -> None:
    """Show the power, run, collect or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("power")
    runs = parts.add_parser("run")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--task", choices=["even-pairs", "missing-duplicate", "cycle-navigation"])
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
        run_study(options.folder, options.task)
    elif options.part == "collect":
        collect(options.folder, options.records)
    else:
        judge(options.records, options.out)


if __name__ == "__main__":
    main()
