"""Reads the committed records of the study of speed and analyses them as speed.md registers.

    python experiments/read_speed.py --out reports/speed

Candidates are measured on initialisations built anew from the configurations (one to two seconds each); nothing
else than the records is needed. As long as a run is missing nothing is analysed: results are read once, together.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from joint_permutation import joint_rank_tests
from pack_records import read_history
from predictors import COLUMNS, Study, blocks, candidates_at, mask_cells, rank_candidates, run_outcomes
from scipy import stats

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.reach import shortcut
from semdiag.measuring.training_runs import run_table
from semdiag_files import InputError
from semdiag_models import Encoder
from semdiag_models.sweep import SweepRun, read_sweep
from semdiag_models.tasks import find_task

HERE = Path(__file__).parent
CANDIDATES = ("dispersion", "xi_sound", "lambda_sound")
ORDERED = 0.1  # of the way from the shortcut to 1: a mask that comes so far has learned something
FEWEST = 3  # masks of a task that have; with fewer there is no order to explain
STRONG, EXCLUDED, LEVEL = 0.7, 0.5, 0.05
INITIALISATION = "initialisation"


def recorded(sweep: Path, records: Path) -> dict[SweepRun, dict[str, list[float]]]:
    """The runs of a sweep and their histories.

    Args:
        sweep: its TOML file.
        records: folder of ``semdiag sweep --records``.

    Raises:
        InputError: if a run has no record.
    """
    runs = read_sweep(sweep)
    histories = {run: read_history(records, run) for run in runs}
    missing = sum(history is None for history in histories.values())
    if missing:
        raise InputError(
            f"{records} lacks {missing} of {len(runs)} runs. To train them: "
            f"semdiag sweep {sweep} --records {records}"
        )
    return {run: history for run, history in histories.items() if history is not None}


def initialisation(run: SweepRun) -> LoadedModel:
    """The model before its first step, which follows from the configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(run.training.seed)
        encoder = Encoder(run.model)
        encoder.scale_queries_and_keys(run.training.query_key_scale)
    return LoadedModel(
        run.name, "", encoder.eval().with_exact_positions(), "semdiag", INITIALISATION, run.training.task_label,
        run.training.seed, 0, run.training,
    )  # fmt: skip


def study(runs: dict[SweepRun, dict[str, list[float]]], candidates: Sequence[str] = CANDIDATES) -> Study:
    """Runs, histories, and the candidates at the initialisation, as findings ask for them."""
    models, values = [], []
    for run, history in runs.items():
        start = initialisation(run)
        last = LoadedModel(
            run.name, "", start.module, "semdiag", "last", start.task, start.seed, len(history["epoch"]),
            run.training, history,
        )  # fmt: skip
        models.append(last)
        for name, value in candidates_at(start, Conditions(), candidates).items():
            known = math.nan if value == math.inf else value
            values.append({"model": run.name, "epoch": 0, "candidate": name, "ln_value": known})
    histories = pd.concat(
        [pd.DataFrame(model.history).assign(model=model.path) for model in models], ignore_index=True
    )
    nothing = pd.DataFrame({"model": []})
    measurements = Measurements(
        nothing, nothing, nothing, histories, nothing, {"target": 0.95},
        runs=run_table(models),
    )  # fmt: skip
    return Study(measurements, pd.DataFrame(values, columns=COLUMNS))


def without_order(runs: dict[SweepRun, dict[str, list[float]]]) -> list[str]:
    """Tasks on which fewer than three masks learned anything, in mean final training accuracy over seeds."""
    rows = pd.DataFrame(
        {
            "task": run.training.task_label,
            "mask": (run.model.attention_label, run.model.inverse_temperature),
            "way": _way(run, history["train_accuracy"][-1]),
        }
        for run, history in runs.items()
    )
    learned = rows.groupby(["task", "mask"])["way"].mean().ge(ORDERED).groupby("task").sum()
    return [str(task) for task in learned.index[learned < FEWEST]]


def _way(run: SweepRun, accuracy: float) -> float:
    """Share of the way from the task's shortcut level to 1."""
    level = shortcut(find_task(run.training.task), run.training.length).accuracy
    return (accuracy - level) / (1 - level)


def registered_tests(cells: pd.DataFrame) -> pd.DataFrame:
    """The three candidates as one family; δ alone over all masks; both outcomes. With the registered verdict."""
    cells = cells[(cells["stage"] == INITIALISATION) & cells["candidate"].isin(CANDIDATES)]
    alone = cells[cells["candidate"] == "dispersion"]
    parts = [
        rank_candidates(rows, outcome).assign(masks=masks)
        for outcome in ("loss_area", "epochs")
        for masks, rows in (("of which all are known", cells), ("all", alone))
    ]
    found = pd.concat(parts, ignore_index=True)
    return found.assign(verdict=[_verdict(row) for row in found.to_dict("records")])


def _verdict(row: dict[str, float]) -> str:
    if row["p_corrected"] <= LEVEL and row["held_out"] >= STRONG:
        return "predicts"
    if row["low"] > -EXCLUDED and row["high"] < EXCLUDED:
        return "excluded as a strong predictor"
    return "these runs cannot tell"


def by_task(cells: pd.DataFrame, outcome: str = "loss_area") -> pd.DataFrame:
    """ρ of every candidate within every task, on the cells that the tests use."""
    cells = cells[(cells["stage"] == INITIALISATION) & cells["candidate"].isin(CANDIDATES)]
    laid_out = blocks(cells, outcome)
    found = joint_rank_tests(laid_out.outcome, laid_out.candidates, draws=1, resamples=0).by_task
    names = [candidate for _, candidate in laid_out.names]
    return pd.DataFrame(found.T, columns=names, index=pd.Index(laid_out.tasks, name="task")).reset_index()


def dose_runs(runs: dict[SweepRun, dict[str, list[float]]]) -> pd.DataFrame:
    """One row per run and arm of the causal experiment: task, attention, arm, factor, seed, loss_area.

    The factor is that of the scores at the initialisation, and of δ; runs with 1 belong to both arms.
    """
    rows = []
    for run, history in runs.items():
        for_good, at_first = run.model.inverse_temperature, round(run.training.query_key_scale**2, 6)
        for arm, factor, other in (("for good", for_good, at_first), ("at first", at_first, for_good)):
            if other == 1:
                rows.append(
                    {
                        "task": run.training.task_label, "attention": run.model.attention_label, "arm": arm,
                        "factor": factor, "seed": run.training.seed,
                        "loss_area": math.log(np.mean(history["train_loss"])),
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def dose_slopes(doses: pd.DataFrame) -> pd.DataFrame:
    """Slope of loss_area on ln(factor), by least squares, of every attention, arm and task."""
    names = ["attention", "arm", "task"]
    slopes = [
        {**dict(zip(names, key, strict=True)), "runs": len(own),
         "slope": float(np.polyfit(np.log(own["factor"]), own["loss_area"], 1)[0])}
        for key, own in doses.groupby(names, sort=False)
    ]  # fmt: skip
    return pd.DataFrame(slopes)


def dose_means(slopes: pd.DataFrame) -> pd.DataFrame:
    """Mean slope over tasks with a 95% t-interval over tasks, of every attention and arm."""
    rows = []
    for (attention, arm), own in slopes.groupby(["attention", "arm"], sort=False):
        mean, error = own["slope"].mean(), stats.sem(own["slope"])
        low, high = stats.t.interval(0.95, len(own) - 1, mean, error)
        rows.append(
            {"attention": attention, "arm": arm, "tasks": len(own), "mean": mean, "low": low, "high": high}
        )
    return pd.DataFrame(rows)


def dose_verdict(means: pd.DataFrame) -> str:
    """The registered reading of the causal arm."""
    if (means["low"] > 0).all():
        return "δ drives speed: all intervals lie above 0."
    signs = means.groupby("attention")["mean"].agg(lambda slopes: len(set(np.sign(slopes))) > 1)
    if signs.any():
        return f"The two arms disagree in sign ({', '.join(signs.index[signs])}): what was moved is not δ alone."
    return "Not all intervals lie above 0: that δ drives speed is not shown."


def _write(folder: Path, tables: Iterable[tuple[str, pd.DataFrame]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables:
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
        print(f"\n{name}\n{table.to_string(index=False)}" if len(table) <= 40 else f"\n{name}: {len(table)} rows")


def main() -> None:
    """Analyse what is complete, and say what is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    try:
        runs = recorded(HERE / "speed.toml", HERE / "speed")
    except InputError as error:
        print(f"The comparison of masks: {error}")
    else:
        left_out = without_order(runs)
        print(f"Tasks without an order to explain: {', '.join(left_out) or 'none'}")
        findings = study({run: h for run, h in runs.items() if run.training.task_label not in left_out})
        cells = findings(mask_cells)
        tables = {"outcomes": findings(run_outcomes), "cells": cells, "tests": registered_tests(cells)}
        _write(out, [*tables.items(), ("by_task", by_task(cells))])
    try:
        doses = dose_runs(recorded(HERE / "dose.toml", HERE / "dose"))
    except InputError as error:
        print(f"The causal arm: {error}")
    else:
        slopes = dose_slopes(doses)
        means = dose_means(slopes)
        _write(out, [("doses", doses), ("dose_slopes", slopes), ("dose_means", means)])
        print(dose_verdict(means))


if __name__ == "__main__":
    main()
