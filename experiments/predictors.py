"""What may predict how fast a run learns: candidates at its snapshots, and their rank correlations with speed.

The studies of speed and of frozen queries and keys use it (read_speed.py, frozen_spread.py), and so does the
earlier study of experiments/study.md. Its candidates are measured again by

    python experiments/predictors.py RUN... --out FOLDER    # candidates.csv
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joint_permutation import FEWEST_MASKS, Matrix, complete_cells, joint_rank_tests, spearman
from numpy.typing import NDArray
from torch import Tensor

from semdiag.capturing.attention_call import KINDS, AttentionCall
from semdiag.capturing.batches import split
from semdiag.capturing.loading import LoadedModel, load
from semdiag.measuring.calls.counted_rows import counted_rows
from semdiag.measuring.calls.running import running
from semdiag.measuring.encoders.weights import MovableEncoder, usable_samples
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import DTYPES, Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.reach import shortcut
from semdiag.measuring.survey import survey
from semdiag.measuring.training_runs import FINISHED, STOPPED
from semdiag.questions.bounds.measure import BoundsPlan
from semdiag.questions.convergence.answer import arrivals, epochs_to
from semdiag.questions.lipschitz.measure import plane_secants
from semdiag.questions.mask_stability.measure import MASKS, NoisePlan
from semdiag.questions.stability.measure import SecantsPlan, query_stability, with_bounds
from semdiag_files import InputError
from semdiag_models import ListOpsTrees
from semdiag_models.tasks import find_task, listops_task
from semdiag_models.train import find_device, with_float64

SAMPLES = 50

CANDIDATES = {
    "dispersion": "dispersion δ, median",
    "dispersion_share": "δ over kept keys / δ over all keys, median",
    "entropy": "entropy of the weights, mean",
    "xi_local": "local ξ = 2p(1 − p), median",
    "xi_sound": "sound ξ, median",
    "xi_paper": "paper's ξ, median",
    "lambda_sound": "sound λ of the loss",
    "lambda_paper": "paper's λ of the loss",
    "response": "response to 1% noise, mean",
    "mask_agreement": "mask agreement under 1% noise, mean",
    "query_key_gradient": "gradient share of queries and keys",
    "output_spread": "spread of attention outputs, mean",
    "loss_secant": "slope of loss secants, median",
}
RADIUS = 0.1  # of the loss secants, relative to each tensor's norm
_PLANES, _DIRECTIONS = 8, 4


COLUMNS = ["model", "epoch", "candidate", "ln_value"]


class Study(Findings):
    """Findings of runs, and candidates measured at their snapshots.

    Args:
        measurements: with the table runs and histories.
        predictors: one row per snapshot and candidate: model, epoch, candidate, ln_value.
    """

    def __init__(self, measurements: Measurements, predictors: pd.DataFrame) -> None:
        super().__init__(measurements)
        self.predictors = predictors


def snapshots_of(model: LoadedModel) -> list[Path]:
    """The snapshots in a run's folder by epoch: ``epoch-N.pt`` by N, then ``last.pt``."""
    path = Path(model.path)
    folder = path if path.is_dir() else path.parent
    epochs = {file: file.stem.removeprefix("epoch-") for file in folder.glob("epoch-*.pt")}
    numbered = sorted((int(epoch), file) for file, epoch in epochs.items() if epoch.isdigit())
    return [file for epoch, file in numbered if epoch != model.epoch] + [folder / "last.pt"]


def measure_predictors(
    model: LoadedModel, conditions: Conditions, candidates: Sequence[str] = tuple(CANDIDATES)
) -> pd.DataFrame:
    """Candidates at every snapshot of a run: -inf for the logarithm of zero, NaN for unknown or unbounded."""
    rows = []
    for snapshot in map(load, snapshots_of(model)):
        for candidate, value in candidates_at(snapshot, conditions, candidates).items():
            known = math.nan if value == math.inf else value
            rows.append((model.path, snapshot.epoch, candidate, known))
    return pd.DataFrame(rows, columns=COLUMNS)


def candidates_at(
    snapshot: LoadedModel, conditions: Conditions, wanted: Sequence[str] = tuple(CANDIDATES)
) -> dict[str, float]:
    """Measure candidates of one snapshot, on the run's first held-out samples.

    Args:
        snapshot: of a run of semdiag train.
        conditions: device, precision, seed; at most 50 samples are used.
        wanted: of :data:`CANDIDATES`.

    Returns:
        Natural logarithms by name: -inf of zero, +inf where there is no bound, NaN where the number is unknown.
    """
    attention = snapshot.encoder.config.attention
    plans = (SecantsPlan(), BoundsPlan(tensor_secants=False), *[NoisePlan()] * KINDS[attention].input_dependent)
    samples = min(SAMPLES, conditions.samples)
    few = replace(conditions, inputs=None, samples=samples, plans=plans)
    tokens, labels, _ = snapshot.default_inputs(samples, conditions.seed)
    measured = survey([snapshot], few)
    secants = with_bounds(measured.secants, attention)
    masks = measured[MASKS]
    values = {
        "dispersion": measured.queries["dispersion"].median(),
        **_weights_and_outputs(snapshot, tokens, few),
        "xi_local": query_stability(measured.queries).median(),
        "response": secants["weight_change"].mean(),
        "mask_agreement": masks["agreement"].mean() if len(masks) else 1.0,
        "query_key_gradient": _query_key_share(measured.parameters),
    }
    if "loss_secant" in wanted:
        values["loss_secant"] = _loss_secant(snapshot, tokens, labels, few)
    with np.errstate(divide="ignore"):
        logarithms = {name: float(np.log(value)) for name, value in values.items()}
    logarithms |= {f"xi_{form}": float(secants[f"ln_{form}"].dropna().median()) for form in ("sound", "paper")}
    logarithms |= {f"lambda_{form}": _network_constant(measured, form) for form in ("sound", "paper")}
    return {name: logarithms[name] for name in wanted}


def _network_constant(measured: Measurements, form: str) -> float:
    rows = measured.constants[(measured.constants["quantity"] == "network") & (measured.constants["form"] == form)]
    return float(rows["ln_value"].max())


def _weights_and_outputs(snapshot: LoadedModel, tokens: Tensor, conditions: Conditions) -> dict[str, float]:
    """Return statistics of attention weights and outputs over queries, heads and layers."""
    collected: dict[str, list[Tensor]] = {"dispersion_share": [], "entropy": [], "output_spread": []}

    def collect(call: AttentionCall) -> None:
        counted_call = counted_rows(call)
        rows, counted = counted_call.statistics, counted_call.attending
        everything = rows.maximum - rows.minimum
        share = rows.dispersion() / everything
        collected["dispersion_share"].append(share[counted & (everything > 0)])
        collected["entropy"].append(rows.entropy[counted])
        collected["output_spread"].append(output_spread(call.mixed, counted).flatten())

    device = find_device(conditions.device)
    kind = DTYPES[conditions.decided([snapshot], device).dtype]
    dtype = kind if device.type != "mps" else torch.float32
    with running(snapshot, collect, device, dtype) as run:
        for batch in split(tokens, conditions.batch_size):
            run(batch)
    pooled = {name: torch.cat([part.double().cpu() for part in parts]) for name, parts in collected.items()}
    return {
        "dispersion_share": float(pooled["dispersion_share"].median()),
        "entropy": float(pooled["entropy"].mean()),
        "output_spread": float(pooled["output_spread"].nanmean()),
    }


def _loss_secant(snapshot: LoadedModel, tokens: Tensor, labels: Tensor, conditions: Conditions) -> float:
    """Return the median slope of the loss between the snapshot and points on circles around it."""
    device = with_float64(find_device(conditions.device))
    moved = MovableEncoder(snapshot.encoder, device=device, dtype=torch.float64)
    tokens, labels = usable_samples(moved.encoder, tokens, labels, device)

    def loss(point: Tensor) -> float:
        moved.move_to(point)
        return moved.loss_and_accuracy(tokens, labels)[0]

    rows = plane_secants(moved, loss, (RADIUS,), _PLANES, _DIRECTIONS, conditions.seed)
    return float(np.median([row["slope"] for row in rows]))


def _query_key_share(parameters: pd.DataFrame) -> float:
    """The share of queries' and keys' weights and biases in the squared norm of the loss's gradient."""
    squared = np.exp(2 * parameters["ln_gradient"].to_numpy())  # −inf, a gradient of zero, gives 0
    chosen = parameters["tensor"].str.endswith((".q.weight", ".q.bias", ".k.weight", ".k.bias")).to_numpy()
    return float(squared[chosen].sum() / squared.sum()) if squared.sum() else float("nan")


def output_spread(mixed: Tensor, counted: Tensor) -> Tensor:
    """Return the fraction of the attention outputs' squared norm that varies from query to query.

    spread = Σ_i ‖o_i − ō‖² / Σ_i ‖o_i‖² with ō the mean of the o_i, over the queries i of a sample and head: 0 if
    all queries get the same mixture of values, as under uniform weights.

    Source: none; rank collapse (Dong et al. 2021) measured by its residual. Deviation: in the Frobenius norm.

    Args:
        mixed: outputs o (B, H, L, D).
        counted: bool, broadcastable to (B, H, L), false for queries that do not count, such as padding.

    Returns:
        (B, H), in [0, 1], in float64; NaN if no query counts or all outputs are 0.

    """
    outputs = mixed.double()
    weight = counted.expand(outputs.shape[:-1]).double()[..., None]
    mean = (weight * outputs).sum(2, keepdim=True) / weight.sum(2, keepdim=True)
    apart = (weight * (outputs - mean).square()).sum((2, 3))
    return apart / (weight * outputs.square()).sum((2, 3))


STAGES = ("initialisation", "matched loss")
# The first is the primary one: every run has it. For both, a larger number means slower learning.
OUTCOMES = {
    "loss_area": "log area under the training-loss curve",
    "epochs": "epochs to 90% of the way from the shortcut to 100%",
}
WAY = 0.9  # from the shortcut's accuracy to 1
_RUN = ["group", "task", "attention", "kind", "seed", "model"]


def run_outcomes(findings: Findings) -> pd.DataFrame:
    """Return how fast every run learned, and when it reached the loss at which its task's runs are compared.

    loss_area = ln((1/E) Σ_e loss(e)) over the first E epochs, E being the fewest that a run of the task was
    trained. The matched loss of a task is the lowest training loss that every run of it reached.

    Returns:
        One row per run that is finished or stopped at --until, copies left out: group, task, attention, kind,
        seed, model, common_epochs (E), loss_area, target (training accuracy 90% of the way from the task's
        shortcut to 1; NaN if the task is not one of semdiag's), epochs (to the target; +inf if it was never
        reached, NaN if unknown: no target, or the run was stopped before), matched_loss and matched_epoch (where
        the loss falls to it, linear between epochs, at the earliest 1).
    """
    table = findings(arrivals)
    table = table[table["state"].isin((FINISHED, STOPPED))]
    histories = {
        str(model): rows.dropna(subset=["epoch"]).sort_values("epoch")
        for model, rows in findings.measurements.history.groupby("model", sort=False)
    }
    rows: list[dict[str, Any]] = []
    for _, runs in table.groupby("group", sort=False):
        of_group = [histories[model] for model in runs["model"]]
        common = min(len(history) for history in of_group)
        level = max(float(history["train_loss"].min()) for history in of_group)
        target = _target(json.loads(runs["setting"].iloc[0]))
        for run, history in zip(runs.to_dict("records"), of_group, strict=True):
            loss = history["train_loss"].to_numpy(float)
            arrival = epochs_to(history, target) if target < 1 else None
            censored = math.nan if math.isnan(target) or run["state"] == STOPPED else math.inf
            rows.append(
                {
                    **{name: run[name] for name in _RUN}, "common_epochs": common,
                    "loss_area": math.log(loss[:common].mean()), "target": target,
                    "epochs": censored if arrival is None else float(arrival),
                    "matched_loss": level, "matched_epoch": _crossing(loss, level),
                }
            )  # fmt: skip
    columns = [*_RUN, "common_epochs", "loss_area", "target", "epochs", "matched_loss", "matched_epoch"]
    return pd.DataFrame(rows, columns=columns)


def _target(setting: dict[str, Any]) -> float:
    """Return the accuracy 90% of the way from the shortcut to 1; NaN if the task is not one of semdiag's."""
    trees = setting.get("listops")
    try:
        task = listops_task(ListOpsTrees(**trees)) if trees else find_task(setting["task"])
        level = shortcut(task, setting["length"]).accuracy
    except (InputError, KeyError):
        return math.nan
    return level + WAY * (1 - level)


def _crossing(loss: Matrix, level: float) -> float:
    """Return epoch, counted from 1, at which the loss first falls to the level."""
    at = int(np.argmax(loss <= level))
    if at == 0:
        return 1.0
    return at + float((loss[at - 1] - level) / (loss[at - 1] - loss[at]))


def mask_cells(findings: Study) -> pd.DataFrame:
    """Return outcomes and candidates by task × mask, averaged over the seeds common to all masks of the task.

    So no mask is compared on fewer seeds than another. A candidate at the matched loss is interpolated between the
    snapshots before and after that epoch, linearly in epochs.

    Returns:
        One row per task (group), attention (the mask), stage and candidate: seeds, loss_area (mean), epochs
        (median; +inf where half of the seeds or more never arrive), ln_value (mean; NaN where a seed's is
        unknown).
    """
    outcomes = findings(run_outcomes)
    outcomes = outcomes[_of_shared_seeds(outcomes)]
    values = findings.predictors
    snapshots = {str(model): rows for model, rows in values.groupby("model", sort=False)}
    parts: list[dict[Any, Any]] = []
    for run in outcomes.to_dict("records"):
        numbers_of_run = snapshots.get(run["model"], values.iloc[:0])
        for candidate, rows in numbers_of_run.sort_values("epoch").groupby("candidate", sort=False):
            epochs, numbers = rows["epoch"].to_numpy(float), rows["ln_value"].to_numpy(float)
            for stage, epoch in zip(STAGES, (0.0, run["matched_epoch"]), strict=True):
                value = _between(epochs, numbers, epoch)
                parts.append({**run, "stage": stage, "candidate": candidate, "ln_value": value})
    names = ["group", "attention", "kind", "stage", "candidate"]
    columns = [*names, "seeds", *OUTCOMES, "ln_value"]
    if not parts:
        return pd.DataFrame(columns=columns)
    averaged = [
        {
            **dict(zip(names, name, strict=True)), "seeds": len(cell), "loss_area": cell["loss_area"].mean(),
            "epochs": _median(cell["epochs"].to_numpy(float)), "ln_value": cell["ln_value"].mean(skipna=False),
        }
        for name, cell in pd.DataFrame(parts).groupby(names, sort=False)
    ]  # fmt: skip
    return pd.DataFrame(averaged)[columns]


def _of_shared_seeds(outcomes: pd.DataFrame) -> "pd.Series[bool]":
    """Return which runs with an outcome have a seed that every mask of their task has."""
    masks = outcomes.groupby(["group", "seed"])["attention"].transform("nunique")
    return masks == outcomes.groupby("group")["attention"].transform("nunique")


def _between(epochs: Matrix, numbers: Matrix, epoch: float) -> float:
    """Return a number at an epoch, linear between the snapshots around it; NaN outside of them."""
    if not epochs[0] <= epoch <= epochs[-1]:
        return math.nan
    after = int(np.searchsorted(epochs, epoch))
    if epochs[after] == epoch:
        return float(numbers[after])
    low, high = numbers[after - 1 : after + 1]
    share = (epoch - epochs[after - 1]) / (epochs[after] - epochs[after - 1])
    return -math.inf if -math.inf in (low, high) else float(low + share * (high - low))


def _median(epochs: Matrix) -> float:
    """Return the median, +inf if a middle value is censored; NaN if a seed is unknown."""
    return math.nan if np.isnan(epochs).any() else float(np.median(epochs))


_NAMES = ["stage", "candidate"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Tasks × masks as matrices.

    Attributes:
        tasks: T of them.
        masks: M of them.
        names: stage and candidate, C of them; those that are unknown everywhere are left out.
        outcome: (T, M).
        candidates: (C, T, M).
    """

    tasks: list[str]
    masks: list[str]
    names: list[tuple[str, str]]
    outcome: Matrix
    candidates: Matrix

    @property
    def runs(self) -> int:
        """Return the number of cells with a known outcome."""
        return int((~np.isnan(self.outcome)).sum())


def blocks(cells: pd.DataFrame, outcome: str) -> Blocks:
    """Lay task × mask cells out as matrices.

    Args:
        cells: from :func:`mask_cells`, or any table with its columns.
        outcome: a key of :data:`OUTCOMES`, or another column.
    """
    tasks, masks = ([*cells[name].unique()] for name in ("group", "attention"))
    known = cells[cells["ln_value"].notna()]
    names = [*known[_NAMES].drop_duplicates().itertuples(index=False, name=None)]

    def laid_out(rows: pd.DataFrame, column: str) -> Matrix:
        rows = rows.drop_duplicates(["group", "attention"])
        wide = rows.pivot(index="group", columns="attention", values=column)
        return wide.reindex(index=tasks, columns=masks).to_numpy(float)

    of_names = dict([*cells.groupby(_NAMES, sort=False)])
    shape = len(tasks), len(masks)
    candidates = [laid_out(of_names[name], "ln_value") for name in names]
    return Blocks(tasks, masks, names, laid_out(cells, outcome), np.array(candidates).reshape(len(names), *shape))


def predictor_table(findings: Study, seed: int = 0, draws: int = 9999, resamples: int = 2000) -> pd.DataFrame:
    """Return rank correlations of candidates with learning, by stage, tested by :func:`joint_rank_tests`.

    Returns:
        The rows of :func:`rank_candidates` for every outcome.
    """
    cells = findings(mask_cells)
    parts = [rank_candidates(cells, outcome, seed, draws, resamples) for outcome in OUTCOMES]
    return pd.concat(parts, ignore_index=True)


def rank_candidates(
    cells: pd.DataFrame, outcome: str = "loss_area", seed: int = 0, draws: int = 9999, resamples: int = 2000
) -> pd.DataFrame:
    """Test all candidates of a table of cells against one outcome, as one family on the same cells.

    Source: :func:`joint_permutation.joint_rank_tests`. Deviation: none.

    Args:
        cells: from :func:`mask_cells`.
        outcome: its column.
        seed: of relabellings and resamples.
        draws: relabellings, where there are too many to try all.
        resamples: behind the intervals.

    Returns:
        One row per stage and candidate: outcome, stage, candidate, rho (mean over tasks; positive: the larger the
        number, the slower), low and high (95%, masks resampled), p, p_corrected (for all candidates and stages),
        held_out (mean over tasks of ρ with the sign that it has on the other tasks: 1 is a perfect prediction of
        each task's order, 0 none), tasks, cells (task × mask) and left_out (cells with an outcome that lack a
        candidate or enough masks), relabellings (that differ; no p is below 1 over it), tried.
    """
    columns = ["outcome", *_NAMES, "rho", "low", "high", "p", "p_corrected", "held_out", "tasks", "cells",
               "left_out", "relabellings", "tried"]  # fmt: skip
    laid_out = blocks(cells, outcome)
    if not laid_out.names:
        return pd.DataFrame(columns=columns)
    tests = joint_rank_tests(laid_out.outcome, laid_out.candidates, draws=draws, resamples=resamples, seed=seed)
    table = pd.DataFrame(laid_out.names, columns=_NAMES).assign(
        outcome=outcome, rho=tests.correlation, low=tests.low, high=tests.high, p=tests.p,
        p_corrected=tests.p_family, held_out=[*map(_held_out, tests.by_task)], tasks=tests.tasks,
        cells=tests.cells, left_out=laid_out.runs - tests.cells, relabellings=float(tests.relabellings),
        tried=tests.tried,
    )  # fmt: skip
    return table[columns]


def _held_out(by_task: Matrix) -> float:
    """Return the mean over tasks of ρ times the sign of the others' mean ρ; NaN for fewer than two tasks."""
    known = by_task[~np.isnan(by_task)]
    if len(known) < 2:
        return math.nan
    return float((known * np.sign(known.sum() - known)).mean())


def held_out_tasks(findings: Study) -> pd.DataFrame:
    """Predict the order of masks on each task from the others.

    Returns:
        One row per outcome, task and choice: outcome, group, choice, stage, candidate, rho_others, rho. Choices:
        ``strongest elsewhere`` (the candidate with the largest |ρ| over the other tasks, with its sign there) and
        ``the mask itself`` (its mean rank on the other tasks: a candidate that does no better only tells masks
        apart). rho is Spearman's correlation of the prediction with the outcome, over the task's masks that
        another task has, too: NaN for fewer than five or if all learned alike, 0 if all are predicted alike. Empty
        with fewer than two tasks.
    """
    columns = ["outcome", "group", "choice", *_NAMES, "rho_others", "rho"]
    rows = []
    for outcome in OUTCOMES:
        laid_out = blocks(findings(mask_cells), outcome)
        if not laid_out.names:
            continue
        by_task = joint_rank_tests(laid_out.outcome, laid_out.candidates, draws=1, resamples=0).by_task
        known = complete_cells(laid_out.outcome, laid_out.candidates)
        usable = np.flatnonzero(~np.isnan(by_task).any(0))
        for t in usable if len(usable) > 1 else ():
            others = usable[usable != t]
            elsewhere = by_task[:, others].mean(1)
            best = int(np.abs(elsewhere).argmax())
            stage, candidate = laid_out.names[best]
            common = {"outcome": outcome, "group": laid_out.tasks[t]}
            seen = known[t] & known[others].any(0)
            learned = laid_out.outcome[t, seen]
            predicted = np.sign(elsewhere[best]) * laid_out.candidates[best, t, seen]
            rows.append(
                {
                    **common, "choice": "strongest elsewhere", "stage": stage, "candidate": candidate,
                    "rho_others": elsewhere[best], "rho": _agreement(predicted, learned),
                }
            )  # fmt: skip
            itself = _mean_ranks(laid_out.outcome[others], known[others])[seen]
            rows.append({**common, "choice": "the mask itself", "rho": _agreement(itself, learned)})
    return pd.DataFrame(rows, columns=columns)


def _mean_ranks(outcome: Matrix, known: NDArray[np.bool_]) -> Matrix:
    """Return the mean rank, in 0 … 1, of every mask over tasks (T, M)."""
    return pd.DataFrame(np.where(known, outcome, math.nan)).rank(axis=1, pct=True).mean().to_numpy()


def _agreement(predicted: Matrix, learned: Matrix) -> float:
    if len(learned) < FEWEST_MASKS or (learned == learned[0]).all():
        return math.nan
    return 0.0 if (predicted == predicted[0]).all() else spearman(predicted, learned)


def main() -> None:
    """Measure all candidates at every snapshot of runs, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders of semdiag train")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table")
    options = parser.parse_args()
    tables = [measure_predictors(load(run), Conditions()) for run in options.runs]
    options.out.mkdir(parents=True, exist_ok=True)
    pd.concat(tables, ignore_index=True).to_csv(options.out / "candidates.csv", index=False)


if __name__ == "__main__":
    main()
