"""How much can a head's output move when its queries, keys and values move? Spectral norms of its Jacobian."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.capturing.batches import Batch, first_samples, samples_of
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.spectral_norms import jacobian_spectral_norm
from semdiag.measuring.calls.capture import longest_call
from semdiag.measuring.calls.collector import scored_rows
from semdiag.measuring.calls.running import running
from semdiag.measuring.table import Table, columns_of
from semdiag.measuring.words import counted

SAMPLES = 8
QUERIES = 256  # of a sample and head, evenly spaced; the rest is left out, and the norm is a lower bound
STEPS = 10
_LONG = 512
_FEWEST = 2  # keys above which texts are long, and the samples of which gains are measured then
_PAIRS = 2**17  # of queries and keys of a sample and head, beyond which fewer queries are taken
_ENTRIES = 2**22  # scores at a time
_WAYS = {"gain": ("q", "k", "v"), "score_gain": ("q", "k"), "value_gain": ("v",)}  # what moves

GAINS = Table(
    "gains",
    "One row per sample, layer and head: largest ratio of ‖change of the output‖ to ‖change of the input‖, found "
    "by bidiagonalisation, where the input is queries, keys and values (gain), queries and keys (score_gain), or "
    "values (value_gain, the spectral norm of the weights); Euclidean norms over all tokens; xi: mean local ξ.",
    columns_of("model str; sample layer head queries int32; gain score_gain value_gain xi float64; settled bool"),
)


def measure_gains(
    loaded: LoadedModel,
    batches: Iterable[Batch],
    note: Callable[[str, str, str], None] = lambda name, why, where: None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    remark: Callable[[str, str], None] = lambda text, code: None,
) -> pd.DataFrame:
    """Measure the gains of every head on the first samples; of long samples on fewer, and on fewer queries."""
    batches = list(first_samples(batches, SAMPLES))
    length, keys = longest_call(loaded, batches, device, torch.float64)
    queries = max(QUERIES // 8, min(QUERIES, _PAIRS // keys))
    if length > queries:
        batches = list(first_samples(batches, samples_at_once(keys)))
        taken = counted(sum(map(samples_of, batches)), "sample")
        remark(f"gains: {taken}, and at most {queries} evenly spaced queries of each", "gains-thinned")
    generator = torch.Generator().manual_seed(seed)
    parts: list[dict[str, Any]] = []
    numbers = set()
    done = 0

    def add(call: AttentionCall) -> None:
        if not call.factored or call.sinks is not None:
            numbers.add(call.module)
            return
        for sample in range(len(call.q)):
            columns = _gains(call.part(slice(sample, sample + 1), spaced(call.q.shape[2], queries)), generator)
            place = {"sample": done + sample, "layer": call.layer, "head": np.arange(call.q.shape[1])}
            parts.append({**place, **columns})

    with running(loaded, add, device, torch.float64) as run:
        for batch in batches:
            run(batch)
            done = max((int(part["sample"]) + 1 for part in parts), default=done)
    if numbers:
        why = "scores of its attention are not products of queries and keys alone"
        note("gains", why, ", ".join(sorted(numbers)))
    return GAINS.of_parts(pd.DataFrame({"model": loaded.path, **columns}) for columns in parts)


def samples_at_once(keys: int) -> int:
    """Return of how many samples gains are measured, in one pass if they are one batch."""
    return SAMPLES if keys <= _LONG else _FEWEST


def spaced(length: int, most: int = QUERIES) -> Tensor:
    """Return at most so many evenly spaced positions, the last among them."""
    return torch.arange(length - 1, -1, -math.ceil(length / most)).flip(0)


def _gains(call: AttentionCall, generator: torch.Generator) -> dict[str, np.ndarray]:
    shared = call.q.shape[1] // call.k.shape[1]
    keys, values = (each.double().repeat_interleave(shared, 1) for each in (call.k, call.v))
    call = replace(call, q=call.q.double(), k=keys, v=values)
    columns: dict[str, list[np.ndarray]] = {}
    at_once = max(1, _ENTRIES // (call.q.shape[2] * call.k.shape[2]))
    for first in range(0, call.q.shape[1], at_once):
        some = _heads(call, slice(first, first + at_once))
        rows = scored_rows(some)
        head = _Head(some, rows.weights)
        start = torch.randn(some.q.shape[:3] + some.v.shape[3:], generator=generator, dtype=torch.float64)
        start = (start.to(some.q.device) * rows.counted[..., None]).flatten(2)
        largest = rows.weights.amax(-1)
        count = rows.counted.sum(-1)
        gains = {"xi": (2 * largest * (1 - largest) * rows.counted).sum(-1) / count, "queries": count}
        gains["settled"] = torch.ones_like(count, dtype=torch.bool)
        for name, free in _WAYS.items():
            norm = jacobian_spectral_norm(partial(head.forward, free), partial(head.back, free), start, STEPS)
            gains[name] = norm.value
            gains["settled"] = gains["settled"] & norm.settled
        for name, values in gains.items():
            columns.setdefault(name, []).append(values[0].cpu().numpy())
    return {name: np.concatenate(several) for name, several in columns.items()}


class _Head:
    """The differential do = P dv + (P ∘ (ds − Σ P ds)) v of a head at fixed kept keys, and its transpose."""

    def __init__(self, call: AttentionCall, weights: Tensor) -> None:
        self.call = call
        self.weights = weights
        self.slope: Tensor | float = call.scale
        if call.softcap is not None:
            capped = torch.tanh(call.scale * (call.q @ call.k.mT) / call.softcap)
            self.slope = call.scale * (1 - capped.square())

    def forward(self, free: tuple[str, ...], moves: Tensor) -> Tensor:
        """Return do for moves of the free ones among q, k and v."""
        shapes = [getattr(self.call, name).shape for name in free]
        parts = torch.split(moves, [shape[2] * shape[3] for shape in shapes], -1)
        d = {name: part.reshape(shape) for name, part, shape in zip(free, parts, shapes, strict=True)}
        output = torch.zeros_like(self.call.q[..., :1])
        if "q" in d:
            change = self.slope * (d["q"] @ self.call.k.mT + self.call.q @ d["k"].mT)
            change = self.weights * (change - (self.weights * change).sum(-1, keepdim=True))
            output = output + change @ self.call.v
        if "v" in d:
            output = output + self.weights @ d["v"]
        return output.flatten(2)

    def back(self, free: tuple[str, ...], output: Tensor) -> Tensor:
        """Return the transpose's image of do."""
        u = output.reshape(*self.call.q.shape[:3], self.call.v.shape[3])
        gradients: dict[str, Tensor] = {}
        if "q" in free:
            change = u @ self.call.v.mT
            change = self.slope * (self.weights * (change - (self.weights * change).sum(-1, keepdim=True)))
            gradients |= {"q": change @ self.call.k, "k": change.mT @ self.call.q}
        if "v" in free:
            gradients["v"] = self.weights.mT @ u
        return torch.cat([gradients[name].flatten(2) for name in free], -1)


def _heads(call: AttentionCall, heads: slice) -> AttentionCall:
    def of(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, heads]

    parts: dict[str, Any] = {name: getattr(call, name)[:, heads] for name in ("q", "k", "v", "mixed")}
    parts |= {name: of(getattr(call, name)) for name in ("allowed", "bias", "selected", "fully_masked")}
    return replace(call, **parts)
