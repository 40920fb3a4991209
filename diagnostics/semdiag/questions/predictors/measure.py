"""What may predict how fast a run learns: numbers at its initialisation and at every snapshot after it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_kinds import CHANGING
from semdiag.capturing.batches import split
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.output_spread import output_spread
from semdiag.measuring.calls.counted_rows import counted_rows
from semdiag.measuring.calls.running import running
from semdiag.measuring.conditions import DTYPES, Conditions
from semdiag.measuring.encoders.movable import MovableEncoder, usable_samples
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.runs.tables import PREDICTORS
from semdiag.measuring.survey import survey
from semdiag.questions.bounds.measure.probe import BoundsPlan
from semdiag.questions.lipschitz.measure.secants import plane_secants
from semdiag.questions.mask_stability.measure.probe import NoisePlan
from semdiag.questions.over_training.measure import SAMPLES, load_snapshots, query_key_share
from semdiag.questions.stability.measure.probe import SecantsPlan
from semdiag.questions.stability.measure.softmax_bounds import local_stability, with_bounds
from semdiag_models.device import find_device, with_float64

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


def measure_predictors(
    model: LoadedModel,
    conditions: Conditions,
    candidates: Sequence[str] = tuple(CANDIDATES),
    after_snapshot: Callable[[int], None] = lambda count: None,
    snapshots: Sequence[LoadedModel] | None = None,
) -> pd.DataFrame:
    """Measure candidates at every snapshot of a run, on the run's first held-out samples.

    Source: docs/theory.md, sections on δ, ξ, λ, secants and mask stability. Deviation: not in the paper.

    Args:
        model: a run.
        conditions: device, precision, seed; at most 50 samples are used.
        candidates: of :data:`CANDIDATES`.
        after_snapshot: called with 1 after each snapshot.
        snapshots: of the run; None: they are loaded.

    Returns:
        The table ``predictors``: one row per snapshot and candidate, queries of all layers and heads pooled.
        ``ln_value`` is the natural logarithm of the number: -inf of zero, NaN where it is unknown or unbounded.

    Raises:
        InputError: if a snapshot cannot be read.
    """
    rows = []
    for snapshot in load_snapshots(model) if snapshots is None else snapshots:
        for candidate, value in candidates_at(snapshot, conditions, candidates).items():
            known = math.nan if value == math.inf else value
            row = {"model": model.path, "epoch": snapshot.epoch, "candidate": candidate, "ln_value": known}
            rows.append(row)
        after_snapshot(1)
    return PREDICTORS.of_rows(rows)


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
    plans = (SecantsPlan(), BoundsPlan(tensor_secants=False), *[NoisePlan()] * (attention in CHANGING))
    samples = min(SAMPLES, conditions.samples)
    few = replace(conditions, inputs=None, samples=samples, plans=plans)
    tokens, labels, _ = snapshot.default_inputs(samples, conditions.seed)
    measured = survey([snapshot], few)
    secants = with_bounds(measured.secants, attention)
    values = {
        "dispersion": measured.queries["dispersion"].median(),
        **_weights_and_outputs(snapshot, tokens, few),
        "xi_local": local_stability(measured.queries).median(),
        "response": secants["weight_change"].mean(),
        "mask_agreement": measured.masks["agreement"].mean() if len(measured.masks) else 1.0,
        "query_key_gradient": query_key_share(measured.parameters),
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
