"""The rows of a monitor's table: statistics of one attention call during training."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.mathematics.softmax_secants import local_stability_of_weight
from semdiag.measuring.calls.counted_rows import CountedRows, attended_keys, counted_rows

_SAMPLES = 4  # looked at per attention call: score rows = samples × queries × heads


def columns(k: Sequence[int]) -> list[str]:
    """Return the column names of a monitor's table."""
    own = ["step", "layer", "module", "occurrence", "rows", "keys", "dispersion", "separation", "xi", "entropy"]
    return own + [f"{name}_k{value}" for value in k for name in ("dispersion", "separation", "mass")]


def sampled_rows(
    call: AttentionCall, k: Sequence[int], generator: torch.Generator, queries: int | None = 8
) -> CountedRows:
    """Return a few random rows of an attention call, or all of them."""
    most = min(max(k, default=0), call.k.shape[2])
    call = replace(call, v=call.v[..., :0])  # values are unused: copy none
    if queries is None:
        return counted_rows(call, top=most)
    batch, _, length, _ = call.q.shape
    b = torch.randperm(batch, generator=generator)[:_SAMPLES].sort().values.to(call.q.device)
    r = torch.randperm(length, generator=generator)[:queries].sort().values.to(call.q.device)
    # On the CPU: a few rows take a thousand small operations, and an accelerator takes longer to start each.
    rows = counted_rows(_on_cpu(call.part(b, r)), top=most)
    return replace(rows, real_keys=attended_keys(call, b).cpu())


def _on_cpu(call: AttentionCall) -> AttentionCall:
    moved: dict[str, Any] = {n: value.cpu() for n, value in vars(call).items() if isinstance(value, torch.Tensor)}
    return replace(call, **moved)


def describe(rows: CountedRows, k: Sequence[int]) -> dict[str, float | int]:
    """Return medians over the rows that count and have keys; NaN for a quantity that no row has."""
    statistics, used = rows.statistics, rows.attending
    weight = statistics.largest_weight()
    values = {
        "keys": statistics.keys.to(weight.dtype),
        "dispersion": statistics.dispersion(),
        "separation": statistics.separation(),
        "xi": local_stability_of_weight(weight),
        "entropy": statistics.entropy,
    }
    for value in k:
        most = min(value, len(statistics.top_load))
        values[f"dispersion_k{value}"] = statistics.dispersion(most)
        values[f"separation_k{value}"] = statistics.separation(most)
        values[f"mass_k{value}"] = statistics.mass_kept(most)
    medians: dict[str, float | int] = {"rows": int(used.sum())}
    for name, numbers in values.items():
        there = numbers[used & numbers.isfinite()]
        medians[name] = float(there.quantile(0.5)) if len(there) else math.nan
    return medians
