"""How fast runs learn: epochs to a training accuracy, and speed-up over full attention, censored runs included."""

import math
from typing import Any

import numpy as np
import pandas as pd

from semdiag.mathematics.censored import kaplan_meier_median, logrank_p, median_interval
from semdiag.measuring.findings.estimates import known_rows
from semdiag.measuring.findings.findings import MODEL_FACTS, Findings, Summary, json_object, records
from semdiag.measuring.findings.resampling import ratio_interval
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.training_runs import NOT_BEGUN, TARGET, setting_labels

_FEWEST_FOR_LOGRANK = 3  # runs on either side; with fewer no p-value is small
_IDENTITY = ["setting", "kind", "attention", "seed"]


def arrivals(findings: Findings) -> pd.DataFrame:
    """Return when each run first reached the target's training accuracy, and how it generalises."""
    measurements = findings.measurements
    labels = setting_labels(measurements.runs["setting"].tolist())
    histories = {str(model): rows for model, rows in measurements.history.groupby("model", sort=False)}
    rows: list[dict[Any, Any]] = []
    for run in measurements.runs.to_dict("records"):
        history = histories.get(run["model"], measurements.history.iloc[:0]).dropna(subset=["epoch"])
        target = target_of(measurements, run["task"])
        arrived = _arrival(history.sort_values("epoch"), target)
        rows.append({"group": labels[run["setting"]], **run, "target": target, **arrived})
    table = pd.DataFrame(rows, columns=[*_ARRIVAL_COLUMNS])
    table = table.sort_values("epochs", ascending=False, kind="stable").drop_duplicates(_IDENTITY).sort_index()
    ordered = table.assign(first=pd.factorize(table["group"])[0], sparse=table["kind"] != "full")
    table = table.loc[ordered.sort_values(["first", "sparse", "attention", "seed"], kind="stable").index]
    return table.astype({"arrival": "Int64", "best_epoch": "Int64"}).reset_index(drop=True)


_ARRIVAL_COLUMNS = (
    "group", "task", "attention", "kind", "seed", "target", "arrival", "epochs", "planned", "state",
    "train_accuracy", "holdout_accuracy", "best_holdout_accuracy", "best_epoch", "gap", "model", "setting",
)  # fmt: skip


def target_of(measurements: Measurements, task: str) -> float:
    """Return the training accuracy that counts as having learned a task."""
    general = measurements.provenance.get("target", TARGET)
    return float(measurements.provenance.get("targets", {}).get(task, general))


def _arrival(history: pd.DataFrame, target: float) -> dict[str, Any]:
    if history.empty:
        return dict.fromkeys(("train_accuracy", "holdout_accuracy", "best_holdout_accuracy", "gap"), math.nan)
    last, best = history.iloc[-1], history.iloc[int(history["holdout_accuracy"].argmax())]
    return {
        "arrival": epochs_to(history, target),
        "train_accuracy": float(last["train_accuracy"]),
        "holdout_accuracy": float(last["holdout_accuracy"]),
        "best_holdout_accuracy": float(best["holdout_accuracy"]),
        "best_epoch": int(best["epoch"]),
        "gap": float(last["train_accuracy"] - last["holdout_accuracy"]),
    }


def epochs_to(history: pd.DataFrame, target: float = TARGET) -> int | None:
    """Return the first epoch whose training accuracy reaches the target."""
    if "train_accuracy" not in history:
        return None
    at_target = history[history["train_accuracy"] >= target]
    return None if at_target.empty else int(at_target["epoch"].iloc[0])


def speed_ups(table: pd.DataFrame) -> pd.DataFrame:
    """Return the speed-up of every run over the full-attention run of the same setting and seed."""
    rows = []
    for _, runs in table.groupby(["setting", "seed"], sort=False):
        full = runs[runs["attention"] == "full"]
        for run in runs[runs["attention"] != "full"].to_dict("records") if len(full) else []:
            base = full.iloc[0]
            low, high, known = speed_up(base["arrival"], base["epochs"], run["arrival"], run["epochs"])
            facts = {name: run[name] for name in ("group", "task", "attention", "kind", "seed")}
            rows.append(
                {
                    **facts, "full_arrival": base["arrival"], "full_epochs": base["epochs"],
                    "arrival": run["arrival"], "epochs": run["epochs"], "low": low, "high": high,
                    **_one_epoch_off(base["arrival"], base["epochs"], run["arrival"], run["epochs"]),
                    "known": known, "full": base["model"], "model": run["model"],
                }
            )  # fmt: skip
    columns = [
        "group", "task", "attention", "kind", "seed", "full_arrival", "full_epochs", "arrival", "epochs", "low",
        "high", "epoch_low", "epoch_high", "known", "full", "model",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns).astype({"full_arrival": "Int64", "arrival": "Int64"})


def _one_epoch_off(full: Any, full_epochs: int, other: Any, other_epochs: int) -> dict[str, float]:
    """Return the range of a speed-up if every arrival may be off by one epoch."""
    later, earlier = (None if pd.isna(full) else int(full) + by for by in (1, -1))
    slower, faster = (None if pd.isna(other) else int(other) + by for by in (1, -1))
    low, _, _ = speed_up(earlier, full_epochs, slower, other_epochs)
    high = math.inf if faster == 0 else speed_up(later, full_epochs, faster, other_epochs)[1]
    return {"epoch_low": low, "epoch_high": high}


def speed_up(full: Any, full_epochs: int, other: Any, other_epochs: int) -> tuple[float, float, str]:
    """Return the range of the speed-up of one run over another."""
    if pd.isna(full) and pd.isna(other):
        return 0.0, math.inf, "unknown"
    if pd.isna(full):
        return full_epochs / int(other), math.inf, "above"
    if pd.isna(other):
        return (0.0, int(full) / other_epochs, "below") if other_epochs else (0.0, math.inf, "unknown")
    return int(full) / int(other), int(full) / int(other), "exactly"


_OF_PAIRS = ("speed_up_low", "speed_up_high", "epoch_low", "epoch_high", "interval_low", "interval_high",
             "interval_coverage")  # fmt: skip
_OVER_SEEDS = ["group", "task", "attention", "kind", "seeds", "arrived", "median_epochs", "epochs_low",
               "epochs_high", "coverage", "pairs", *_OF_PAIRS, "logrank_p", "best_holdout_accuracy",
               "gap"]  # fmt: skip


def over_seeds(table: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Return epochs and speed-up of each kind of attention over the seeds of a setting."""
    rows = []
    for (setting, _), runs in table.groupby(["setting", "attention"], sort=False):
        runs = runs[runs["state"] != NOT_BEGUN]
        if runs.empty:
            continue
        last_epochs = runs["arrival"].fillna(runs["epochs"]).to_numpy(float)
        arrived = runs["arrival"].notna().to_numpy()
        epochs = median_interval(last_epochs.tolist(), np.where(arrived, last_epochs, np.inf).tolist())
        pairs_of_runs = pairs[pairs["model"].isin(runs["model"])]
        full = table[
            (table["setting"] == setting) & (table["attention"] == "full") & (table["state"] != NOT_BEGUN)
        ]
        rows.append(
            {
                **{name: runs[name].iloc[0] for name in ("group", "task", "attention", "kind")},
                "seeds": len(runs),
                "arrived": int(arrived.sum()),
                "median_epochs": kaplan_meier_median(last_epochs.tolist(), arrived.tolist()),
                "epochs_low": epochs.interval_low,
                "epochs_high": epochs.interval_high,
                "coverage": epochs.coverage,
                **_speed_up_over_seeds(pairs_of_runs),
                "logrank_p": _logrank(full, runs) if runs["attention"].iloc[0] != "full" else math.nan,
                "best_holdout_accuracy": float(runs["best_holdout_accuracy"].median()),
                "gap": float(runs["gap"].median()),
            }
        )
    return pd.DataFrame(rows, columns=_OVER_SEEDS)


def _speed_up_over_seeds(pairs: pd.DataFrame) -> dict[str, Any]:
    if pairs.empty:
        return {"pairs": 0, **dict.fromkeys(_OF_PAIRS, math.nan)}
    interval = median_interval(pairs["low"].tolist(), pairs["high"].tolist())
    one_epoch_off = median_interval(pairs["epoch_low"].tolist(), pairs["epoch_high"].tolist())
    medians = interval.low, interval.high, one_epoch_off.low, one_epoch_off.high
    values = (*medians, interval.interval_low, interval.interval_high, interval.coverage)
    return {"pairs": len(pairs), **dict(zip(_OF_PAIRS, values, strict=True))}


def _logrank(full: pd.DataFrame, other: pd.DataFrame) -> float:
    if min(len(full), len(other)) < _FEWEST_FOR_LOGRANK:
        return math.nan
    if full["arrival"].isna().all() and other["arrival"].isna().all():
        return math.nan
    sides = (
        (side["arrival"].fillna(side["epochs"]).tolist(), side["arrival"].notna().tolist())
        for side in (full, other)
    )
    return logrank_p(*sides)


FEWEST_FOR_MEDIAN = 3  # the median of two runs would be an accuracy that no run had


def seed_curves(findings: Findings, runs: pd.DataFrame, column: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Join the curves of several seeds; a run that stopped at the target keeps its last value."""
    history = findings.measurements.history[findings.measurements.history["model"].isin(runs["model"])]
    by_run = history.dropna(subset=["epoch"]).pivot_table(index="epoch", columns="model", values=column)
    if len(by_run.columns) < FEWEST_FOR_MEDIAN:
        return by_run, pd.DataFrame()
    arrived = runs.loc[runs["arrival"].notna(), "model"]
    by_run = by_run.assign(**by_run[[*arrived]].ffill()).dropna()
    median = by_run.quantile(0.5, axis=1, interpolation="lower").to_frame()
    return median, pd.DataFrame({"low": by_run.min(axis=1), "high": by_run.max(axis=1)})


_RESAMPLES = 200


def speed_dispersion_table(findings: Findings) -> pd.DataFrame:
    """Return the speed-up of every pair of runs beside the ratio of their pooled median dispersions."""
    pairs = speed_ups(findings(arrivals))
    queries = {m: known_rows(findings, m, "dispersion") for m in {*pairs["model"], *pairs["full"]}}
    intervals = [
        ratio_interval(queries[pair["model"]], queries[pair["full"]], resamples=_RESAMPLES)
        for pair in pairs.to_dict("records")
    ]
    return pairs.assign(
        ratio=[i.estimate for i in intervals],
        ratio_low=[i.low for i in intervals],
        ratio_high=[i.high for i in intervals],
    )


def run_statistics(findings: Findings) -> pd.DataFrame:
    """Return each kind of attention over the seeds of a setting, as :func:`~.epochs.over_seeds`."""
    return over_seeds(findings(arrivals), findings(speed_dispersion_table))


_ARRIVAL = (
    *("target", "arrival", "epochs", "planned", "state", "train_accuracy", "holdout_accuracy"),
    *("best_holdout_accuracy", "best_epoch", "gap"),
)


def convergence_summary(findings: Findings) -> Summary:
    """Return epochs to the target, speed-ups, and their relation to dispersion."""
    measurements = findings.measurements
    found, table = findings(arrivals), findings(speed_dispersion_table)
    models = {row["model"]: row for row in measurements.models.to_dict("records")}
    return json_object(
        "convergence",
        findings,
        target=measurements.provenance.get("target"),
        targets=measurements.provenance.get("targets", {}),
        results=[
            {name: models[run["model"]][name] for name in MODEL_FACTS} | {name: run[name] for name in _ARRIVAL}
            for run in records(found)
        ],
        runs=records(found.drop(columns="setting")),
        speed_ups=records(table),
        over_seeds=records(findings(run_statistics)),
    )
