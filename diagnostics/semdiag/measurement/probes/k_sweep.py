"""Within one model, for every k at once: what its scores would be if each query kept its k largest ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_kinds import SCORED
from semdiag.capturing.batches import Batch, longest, split
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.paper_stability import paper_heavy_hitter_stability
from semdiag.mathematics.softmax_stability import fixed_mask_stability, heavy_hitter_stability
from semdiag.measurement.calls.collector import statistics_of
from semdiag.measurement.calls.running import running, unnamed
from semdiag.measurement.percentiles import percentiles
from semdiag.measurement.probe import Probe, Subject
from semdiag.measurement.table import Table
from semdiag_models import Encoder, InputError

SWEEP = Table(
    "sweep",
    "One row per k, layer, head (-1: pooled) and quantity: percentiles within a model.",
    {
        "model": "str",
        **dict.fromkeys(("layer", "head", "k"), "int64"),
        "quantity": "str",
        "queries": "int64",
        "mean": "float64",
        **{f"p{p}": "float64" for p in (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)},
        **dict.fromkeys(("undefined", "not_positive"), "int64"),
    },
)

LARGEST_K = 48
_MOST_NUMBERS = 200_000_000  # top scores held at once: 800 MB


@dataclass(frozen=True)
class SweepPlan:
    """Which k are looked at.

    Raises:
        InputError: if a value is illegal.
    """

    max_k: int | None = None  # None: 48, or one less than the inputs' length
    rerun: bool = False  # whether the model is run with top-k attention for every k

    def __post_init__(self) -> None:
        if self.max_k is not None and self.max_k < 1:
            raise InputError(f"The largest k must be at least 1. Got {self.max_k}.")


def k_sweep(
    model: LoadedModel | nn.Module,
    tokens: Batch | Iterable[Batch],
    labels: Tensor | None = None,
    plan: SweepPlan | None = None,
    *,
    batch_size: int = 100,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> pd.DataFrame:
    """Ask of one model's scores, for every k up to K in one pass, what top-k attention would make of them.

    A within-model comparison: nothing is trained anew, and a model trained with that k has other scores.
    The model itself is not changed.

    Source: docs/theory.md#k-sweep. Deviation: not in the paper, which compares trained models.

    Args:
        model: from :func:`semdiag.load`, or any module; of our encoders those with full or top-k attention.
        tokens: (N, L) int64, or what :func:`~semdiag.measurement.measure.measure` takes.
        labels: (N,) classes, for the accuracy of reruns; None if unknown.
        plan: the largest k; whether the model is run again with every k.
        batch_size: samples at a time.
        device: where to run.
        dtype: of the model and of the scores: float32 or float64.

    Returns:
        The table ``sweep``: one row per k, layer and head (-1: pooled) and quantity, with the columns of
        :func:`~semdiag.measurement.percentiles.percentiles`. Quantities: dispersion δ_h(k), ratio
        δ_h(k)/δ_s, separation Δ_h(k), mass (attention weight of the k largest scores), load, ln_sound and
        ln_paper (ξ of the heavy-hitter mask), sound_better (share of queries whose sound ξ is below that of
        full attention); after a rerun accuracy and same_prediction. k = 0: all keys kept. Empty for a mask
        that does not depend on the input.

    Raises:
        InputError: if K is not below the inputs' length, or there are too many queries for K.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> sweep = k_sweep(encoder, torch.tensor([[0, 1, 1, 0]]))
        >>> sweep[(sweep["quantity"] == "mass") & (sweep["layer"] == -1)]["k"].tolist()
        [1, 2, 3]
    """
    plan = SweepPlan() if plan is None else plan
    loaded = model if isinstance(model, LoadedModel) else unnamed(model)
    if not loaded.external and loaded.encoder.config.attention not in SCORED:
        return SWEEP.empty()
    if plan.rerun:
        _ = loaded.encoder  # only ours can be run with another attention
    batches = split(tokens, batch_size)
    largest = _largest_k(plan, batches)
    collected = _Collector(largest, {})
    with running(loaded, collected.add, device, dtype) as run:
        outputs = [run(batch) for batch in batches]
    rows = list(collected.rows())
    if plan.rerun and isinstance(run.module, Encoder):
        before = torch.cat(outputs).argmax(-1).cpu()
        whole = torch.cat([batch for batch in batches if isinstance(batch, Tensor)])
        rows += _reruns(run.module, whole, labels, before, largest, batch_size)
    return SWEEP.of_rows({"model": loaded.path, **row} for row in rows)


def _largest_k(plan: SweepPlan, batches: Sequence[Batch]) -> int:
    length = max((longest(batch) for batch in batches), default=1)
    if plan.max_k is not None and plan.max_k >= max(length, 2):
        raise InputError(
            f"The largest k must be below the length of the inputs, {length}: then nothing is dropped. "
            f"Got {plan.max_k}."
        )
    return plan.max_k or max(1, min(LARGEST_K, length - 1))


@dataclass
class _Collector:
    """Keeps of every query its top scores, range, number of keys and log-sum-exp; of every key its loads."""

    largest: int
    parts: dict[tuple[int, int], list[dict[str, NDArray[Any]]]]
    numbers: int = 0

    def add(self, call: AttentionCall) -> None:
        self.numbers += call.q[..., 0].numel() * (self.largest + 1)
        if self.numbers > _MOST_NUMBERS:
            raise InputError(
                f"More than {_MOST_NUMBERS:,} top scores are too many to hold. Use fewer samples or a smaller "
                "--max-k."
            )
        found = statistics_of(replace(call, selected=None), self.largest)
        counted = found.keys > 0
        if call.queries is not None:
            counted = counted & call.queries[:, None, :]
        keyed = torch.ones_like(found.load, dtype=torch.bool)
        if call.queries is not None and call.queries.shape[-1] == keyed.shape[-1]:
            keyed = call.queries[:, None, :].expand(keyed.shape)
        for head in range(call.q.shape[1]):
            own = counted[:, head]
            part = {
                "top": found.top[:, head][own].T,
                "range": (found.maximum - found.minimum)[:, head][own],
                "keys": found.keys[:, head][own],
                "log_sum_exp": found.log_sum_exp[:, head][own],
                "load": found.top_load[:, :, head][:, keyed[:, head]],
            }
            self.parts.setdefault((call.layer, head), []).append({n: v.cpu().numpy() for n, v in part.items()})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of the table: each layer and head, then all together."""
        places = {
            place: {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}
            for place, parts in sorted(self.parts.items())
        }
        together = {
            name: np.concatenate([p[name] for p in places.values()], -1) for name in next(iter(places.values()))
        }
        places[-1, -1] = together
        for (layer, head), place in places.items():
            for k, quantity, values in _quantities(place, self.largest):
                yield {"layer": layer, "head": head, "k": k, "quantity": quantity, **percentiles(values)}


def _quantities(place: dict[str, NDArray[Any]], largest: int) -> Iterator[tuple[int, str, NDArray[Any]]]:
    """Every quantity of every k, over the queries (or keys) of one layer and head."""
    top, whole, keys = place["top"].astype(np.float64), place["range"].astype(np.float64), place["keys"]
    kept_mass = np.logaddexp.accumulate(top[:largest], axis=0) - place["log_sum_exp"]
    full = fixed_mask_stability(_tensor(whole), _tensor(keys)).log_value.numpy()
    yield 0, "dispersion", whole
    yield 0, "ln_sound", full
    for k in range(1, largest + 1):
        drops = keys > k  # elsewhere the entries of ``top`` may be -inf
        lowest, following = (np.where(drops, top[at], 0.0) for at in (k - 1, k))
        dispersion = np.where(drops, top[0] - lowest, whole)
        separation = np.where(drops, lowest - following, np.inf)
        kept = np.minimum(keys, k)
        row = _tensor(dispersion), _tensor(separation), _tensor(kept)
        sound = heavy_hitter_stability(*row).log_value.numpy()
        yield k, "dispersion", dispersion
        yield k, "ratio", np.divide(dispersion, whole, out=np.full_like(whole, np.nan), where=whole > 0)
        yield k, "separation", separation
        yield k, "mass", np.where(drops, np.minimum(np.exp(kept_mass[k - 1]), 1.0), 1.0)
        yield k, "load", place["load"][k - 1]
        yield k, "ln_sound", sound
        yield k, "ln_paper", paper_heavy_hitter_stability(*row).log_value.numpy()
        yield k, "sound_better", (sound < full).astype(np.float64)


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float64))


def with_heavy_hitters(encoder: Encoder, k: int) -> Encoder:
    """A second encoder with the same weights that attends to the k largest scores of each query.

    Args:
        encoder: full or top-k attention; it is not changed.
        k: keys kept per query.

    Returns:
        In evaluation mode, with the type and device of the first.
    """
    with torch.random.fork_rng(devices=[]):  # a new encoder draws its initial weights
        swapped = Encoder(replace(encoder.config, attention="topk", k=k))
    like = next(encoder.parameters())
    swapped = swapped.to(device=like.device, dtype=like.dtype)  # before, so that no weight is rounded
    swapped.load_state_dict(encoder.state_dict())
    swapped.positions.copy_(encoder.positions)
    return swapped.eval()


def _reruns(
    encoder: Encoder, tokens: Tensor, labels: Tensor | None, before: Tensor, largest: int, batch_size: int
) -> Iterator[dict[str, Any]]:
    device = next(encoder.parameters()).device
    for k in range(largest + 1):
        after = before
        if k:
            swapped = with_heavy_hitters(encoder, k)
            with torch.inference_mode():
                parts = [swapped(batch.to(device, torch.int64)) for batch in torch.split(tokens, batch_size)]
            after = torch.cat(parts).argmax(-1).cpu()
        found = {"same_prediction": (after == before).numpy()}
        if labels is not None:
            found["accuracy"] = (after == labels.cpu()).numpy()
        for quantity, values in found.items():
            yield {"layer": -1, "head": -1, "k": k, "quantity": quantity, **percentiles(values)}


def _measure(subject: Subject, plan: SweepPlan, prepared: Any) -> Mapping[str, pd.DataFrame]:
    inputs, labels = subject.first
    how: dict[str, Any] = {"batch_size": subject.batch_size, "device": subject.device, "dtype": subject.dtype}
    return {"sweep": k_sweep(subject.model, inputs, labels, plan, **how)}


def _provenance(plan: SweepPlan, samples: int, few: int) -> dict[str, Any]:
    return {"probe_samples": few}


K_SWEEP = Probe("k-sweep", SweepPlan, (SWEEP,), _measure, provenance=_provenance)
