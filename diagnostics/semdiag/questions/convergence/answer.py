"""How fast runs learn: epochs to a training accuracy, and speed-up over full attention, censored runs included."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from semdiag.mathematics.censored import kaplan_meier_median, median_interval
from semdiag.measuring.findings.estimates import known_rows
from semdiag.measuring.findings.findings import Findings, records
from semdiag.measuring.findings.resampling import ratio_interval
from semdiag.measuring.training_runs import NOT_BEGUN, RUNS, TARGET, UNFINISHED, epochs_to, setting_labels
from semdiag.measuring.words import decimals, interval, percent, plain, text
from semdiag.presenting.answer import MOST, Answer, Claim, Shown, heading, measured_glance, with_run_facts
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.learning import reach_claims, target_of, training_curves

_IDENTITY = ["setting", "kind", "attention", "seed"]


def arrivals(findings: Findings) -> pd.DataFrame:
    """Return when each run first reached the target's training accuracy, and how it generalises."""
    measurements = findings.measurements
    labels = setting_labels(measurements[RUNS]["setting"].tolist())
    histories = {str(model): rows for model, rows in measurements.history.groupby("model", sort=False)}
    rows: list[dict[Any, Any]] = []
    for run in measurements[RUNS].to_dict("records"):
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


def _arrival(history: pd.DataFrame, target: float) -> dict[str, Any]:
    if history.empty:
        return dict.fromkeys(("train_accuracy", "holdout_accuracy", "best_holdout_accuracy", "gap"), math.nan)
    last = history.iloc[-1]
    best = history.iloc[int(history["holdout_accuracy"].argmax())]
    return {
        "arrival": epochs_to(history, target),
        "train_accuracy": float(last["train_accuracy"]),
        "holdout_accuracy": float(last["holdout_accuracy"]),
        "best_holdout_accuracy": float(best["holdout_accuracy"]),
        "best_epoch": int(best["epoch"]),
        "gap": float(last["train_accuracy"] - last["holdout_accuracy"]),
    }


def speed_ups(table: pd.DataFrame) -> pd.DataFrame:
    """Return the speed-up of every run over the full-attention run of the same setting and seed."""
    rows = []
    for _, runs in table.groupby(["setting", "seed"], sort=False):
        full = runs[runs["attention"] == "full"]
        for run in runs[runs["attention"] != "full"].to_dict("records") if len(full) else []:
            base = full.iloc[0]
            low, high, exactness = speed_up(base["arrival"], base["epochs"], run["arrival"], run["epochs"])
            facts = {name: run[name] for name in ("group", "task", "attention", "kind", "seed")}
            rows.append(
                {
                    **facts, "full_arrival": base["arrival"], "full_epochs": base["epochs"],
                    "arrival": run["arrival"], "epochs": run["epochs"], "low": low, "high": high,
                    **_one_epoch_off(base["arrival"], base["epochs"], run["arrival"], run["epochs"]),
                    "known": exactness, "full": base["model"], "model": run["model"],
                }
            )  # fmt: skip
    columns = [
        "group", "task", "attention", "kind", "seed", "full_arrival", "full_epochs", "arrival", "epochs", "low",
        "high", "epoch_low", "epoch_high", "known", "full", "model",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns).astype({"full_arrival": "Int64", "arrival": "Int64"})


def _one_epoch_off(full: Any, full_epochs: int, counterpart: Any, counterpart_epochs: int) -> dict[str, float]:
    later, earlier = (None if pd.isna(full) else int(full) + by for by in (1, -1))
    slower, faster = (None if pd.isna(counterpart) else int(counterpart) + by for by in (1, -1))
    low, _, _ = speed_up(earlier, full_epochs, slower, counterpart_epochs)
    high = math.inf if faster == 0 else speed_up(later, full_epochs, faster, counterpart_epochs)[1]
    return {"epoch_low": low, "epoch_high": high}


def speed_up(full: Any, full_epochs: int, counterpart: Any, counterpart_epochs: int) -> tuple[float, float, str]:
    """Return the range of the speed-up of one run over another."""
    if pd.isna(full) and pd.isna(counterpart):
        return 0.0, math.inf, "unknown"
    if pd.isna(full):
        return full_epochs / int(counterpart), math.inf, "above"
    if pd.isna(counterpart):
        return (0.0, int(full) / counterpart_epochs, "below") if counterpart_epochs else (0.0, math.inf, "unknown")
    return int(full) / int(counterpart), int(full) / int(counterpart), "exactly"


_OF_PAIRS = ("speed_up_low", "speed_up_high", "epoch_low", "epoch_high", "interval_low", "interval_high",
             "interval_coverage")  # fmt: skip
_OVER_SEEDS = ["group", "task", "attention", "kind", "seeds", "arrived", "median_epochs", "epochs_low",
               "epochs_high", "coverage", "pairs", *_OF_PAIRS, "best_holdout_accuracy", "gap"]  # fmt: skip


def over_seeds(table: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Return epochs and speed-up of each kind of attention over the seeds of a setting."""
    rows = []
    for _, runs in table.groupby(["setting", "attention"], sort=False):
        runs = runs[runs["state"] != NOT_BEGUN]
        if runs.empty:
            continue
        last_epochs = runs["arrival"].fillna(runs["epochs"]).to_numpy(float)
        arrived = runs["arrival"].notna().to_numpy()
        epochs = median_interval(last_epochs.tolist(), np.where(arrived, last_epochs, np.inf).tolist())
        pairs_of_runs = pairs[pairs["model"].isin(runs["model"])]
        rows.append(
            {
                **{name: runs[name].iloc[0] for name in ("group", "task", "attention", "kind")},
                "seeds": len(runs), "arrived": int(arrived.sum()),
                "median_epochs": kaplan_meier_median(last_epochs.tolist(), arrived.tolist()),
                "epochs_low": epochs.interval_low, "epochs_high": epochs.interval_high,
                "coverage": epochs.coverage, **_speed_up_over_seeds(pairs_of_runs),
                "best_holdout_accuracy": float(runs["best_holdout_accuracy"].median()),
                "gap": float(runs["gap"].median()),
            }
        )  # fmt: skip
    return pd.DataFrame(rows, columns=_OVER_SEEDS)


def _speed_up_over_seeds(pairs: pd.DataFrame) -> dict[str, Any]:
    if pairs.empty:
        return {"pairs": 0, **dict.fromkeys(_OF_PAIRS, math.nan)}
    interval = median_interval(pairs["low"].tolist(), pairs["high"].tolist())
    one_epoch_off = median_interval(pairs["epoch_low"].tolist(), pairs["epoch_high"].tolist())
    medians = interval.low, interval.high, one_epoch_off.low, one_epoch_off.high
    values = (*medians, interval.interval_low, interval.interval_high, interval.coverage)
    return {"pairs": len(pairs), **dict(zip(_OF_PAIRS, values, strict=True))}


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
    "target", "arrival", "epochs", "planned", "state", "train_accuracy", "holdout_accuracy",
    "best_holdout_accuracy", "best_epoch", "gap",
)  # fmt: skip


def arrival_words(run: Mapping[Any, Any]) -> str:
    """Return when a run arrived: ``35``, or ``not in 100``; of an unfinished run also how much is left."""
    if run["state"] == NOT_BEGUN:
        return "not begun"
    words = f"not in {run['epochs']}" if pd.isna(run["arrival"]) else str(run["arrival"])
    return f"{words} (of {run['planned']}, unfinished)" if run["state"] == UNFINISHED else words


def speed_words(low: float, high: float) -> str:
    """Return a speed-up or its bound: ``11.7``, ``above 20``, ``below 0.35``, ``unknown``."""
    if math.isnan(low) or (low == 0 and math.isinf(high)):
        return "unknown"
    if low == high:
        return f"{low:.3g}"
    if math.isinf(high):
        return f"above {low:.3g}"
    return f"below {high:.3g}" if low == 0 else f"{low:.3g} to {high:.3g}"


def epoch_words(row: Mapping[Any, Any]) -> str:
    """Return the range of a median speed-up if every arrival may be off by one epoch; a dash if unknown."""
    exact = row["pairs"] and row["speed_up_low"] == row["speed_up_high"]
    return speed_words(row["epoch_low"], row["epoch_high"]) if exact else "–"


def speed_interval(row: Mapping[Any, Any]) -> str:
    """Return the interval of a median speed-up over seeds, or why there is none."""
    if row["pairs"] == 0:
        return "–"
    if row["pairs"] == 1:
        return "one seed: no interval"
    ends = interval(
        row["interval_low"], row["interval_high"], lambda x: "∞" if math.isinf(x) else f"{x:.3g}", between=" to "
    )
    return f"{ends} ({row['interval_coverage']:.0%})"


def convergence_claims(findings: Findings) -> list[Claim]:
    """Return per task which attention needs the fewest epochs, and what limits that."""
    runs = findings(arrivals)
    seeds = findings(run_statistics)
    claims = []
    for group, rows in seeds.groupby("group", sort=False) if len(seeds) else ():
        claims += _group_claims(findings, str(group), rows, runs[runs["group"] == group])
    return [*claims, *reach_claims(findings), *_reservations(findings, runs)]


def _group_claims(findings: Findings, group: str, rows: pd.DataFrame, runs: pd.DataFrame) -> list[Claim]:
    """Return the kind of attention that needs the fewest epochs in a setting, and the other kinds."""
    target = percent(target_of(findings.measurements, rows["task"].iloc[0]), "g")
    fewest = rows["median_epochs"].min()
    soonest = rows["median_epochs"] == fewest
    start = "epochs"
    if len(rows) > soonest.sum() == 1:
        start = f"{rows.loc[soonest, 'attention'].iloc[0]} needs the fewest epochs"
    arrived = {
        kind: ", ".join(map(arrival_words, of_kind.to_dict("records")))
        for kind, of_kind in runs.groupby("attention")
    }
    parts = []
    for row in rows.sort_values("median_epochs", kind="stable").to_dict("records"):
        words = f"{row['attention']} {arrived[row['attention']]}"
        if row["pairs"]:
            speed = speed_words(row["speed_up_low"], row["speed_up_high"])
            words += f" (speed-up {speed}; {speed_interval(row)})"
        parts.append(words)
    sentence = f"{group}: {start} to {target} training accuracy: {parts[0]}."
    claims = [Claim("fewest-epochs", sentence, group, float(fewest), "epochs")]
    if parts[1:]:
        claims.append(Claim("other-epochs", f"{group}, the others: {'; '.join(parts[1:])}.", group))
    return claims


def _reservations(findings: Findings, table: pd.DataFrame) -> list[Claim]:
    claims = []
    unfinished = table[table["state"].isin([UNFINISHED, NOT_BEGUN])]
    if len(unfinished):
        rows = unfinished.to_dict("records")
        names = "; ".join(f"{row['model']} {row['epochs']} of {row['planned']} epochs" for row in rows)
        claims.append(Claim("unfinished", f"Unfinished, so more may be known later: {names}."))
    runs = len(findings.measurements[RUNS])
    if runs > len(table):
        copies = (
            f"{runs - len(table)} of {runs} files are copies or other snapshots of a run that is shown: of each "
            "run the file with the most epochs counts."
        )
        claims.append(Claim("copies", copies))
    left_out = findings.measurements.provenance.get("left_out", [])
    if left_out:
        claims.append(
            Claim("left-out", f"Left out, because they have no training history: {', '.join(left_out)}.")
        )
    return claims


def _speed(low: float, high: float) -> str:
    return "–" if math.isnan(low) else speed_words(low, high)


_RUN = (Column("group", "task", text), Column("attention", form=text))
_SEED = Column("seed", form=plain)
_RUNS = (
    *_RUN, _SEED, Column("", "epochs to {}", arrival_words), Column("low high", "speed-up", _speed, drop=NEVER),
    Column("ratio", "δ ratio", decimals), Column("train_accuracy", "train", percent, drop=3),
    Column("holdout_accuracy", "held-out", percent), Column("best_holdout_accuracy", "best", percent, drop=1),
    Column("gap", form=percent, drop=2),
)  # fmt: skip
_SEEDS = (
    *_RUN, Column("seeds", form=plain, drop=2), Column("arrived", form=plain, drop=1),
    Column("median_epochs", form=lambda epochs: "not reached" if epochs == math.inf else f"{epochs:g}"),
    Column("speed_up_low speed_up_high", "median speed-up", _speed, drop=NEVER),
    Column("", "one epoch off", epoch_words), Column("", "interval", speed_interval, drop=NEVER),
)  # fmt: skip


def answer(findings: Findings) -> Answer:
    """Return epochs to the target, speed-ups, and their relation to dispersion."""
    provenance = findings.measurements.provenance
    runs = findings(arrivals)
    pairs = findings(speed_dispersion_table)
    seeds = findings(run_statistics)
    speeds = runs.merge(pairs[["model", "low", "high", "ratio"]], how="left", on="model")
    target = percent(provenance.get("target", TARGET), "g")
    targets = provenance.get("targets", {})
    shown: list[Shown] = [NumberTable(_RUNS, records(speeds), unit="the target" if targets else target)]
    if targets:
        single = "".join(f", for {task} {percent(value, 'g')}" for task, value in targets.items())
        shown.append(f"The target is {target} training accuracy{single}.")
    if len(pairs) and seeds["seeds"].max() > 1:
        shown.append(NumberTable(_SEEDS, records(seeds)))
    headline = convergence_claims(findings)
    return Answer(
        measured_glance(findings, findings.measurements[RUNS]),
        headline,
        tables={
            "runs": runs,
            "speed_ups": pairs,
            "over_seeds": seeds,
            "history": with_run_facts(findings, findings.measurements.history),
        },
        results={run["model"]: {name: run[name] for name in _ARRIVAL} for run in records(runs)},
        more={
            "target": provenance.get("target"),
            "targets": targets,
            "runs": records(runs.drop(columns="setting")),
            "speed_ups": records(pairs),
            "over_seeds": records(seeds),
        },
        shown=[*shown, *headline[max(MOST, runs["group"].nunique()) :]],
    )


HEADINGS = heading(
    "convergence", "Which attention learns faster, and by how much?", (training_curves,),
    "Runs that never reach the target are censored, not dropped: medians of epochs are Kaplan–Meier estimates, "
    "those of speed-ups ranges. Intervals over seeds are order statistics, with their confidence; one seed has "
    "none.",
    "Epochs are counted, not seconds. Dispersion and speed are both measured after training: that they go "
    "together does not show that one causes the other.",
)  # fmt: skip
