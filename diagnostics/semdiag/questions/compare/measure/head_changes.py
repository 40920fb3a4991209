"""Two attention calls of the same inputs, compared row by row in float64 and summed up head by head."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.largest_scores import largest_scores
from semdiag.mathematics.selections.agreement import overlaps
from semdiag.measuring.calls.scored_rows import as_mask
from semdiag.questions.compare.measure.changes import output_parts, total_variation

_ENTRIES = 2**20  # weights of each model that are held at a time
# Sums over the compared queries of a head, except for the largest; norms are squared.
SUMS = (
    "queries", "total_variation", "largest", "dispersion_base", "dispersion", "moved", "top_queries", "overlap",
    "output", "by_weights", "by_values", "change", "left_out",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Rows:
    """What some queries of a call attend to, in float64."""

    weights: Tensor  # (b, H, r, n); rows without keys are zeros
    attending: Tensor  # (b, H, r) bool, queries that are no padding and attend to a key
    dispersion: Tensor  # (b, H, r), δ in nats
    top: Tensor  # (b, H, r, k) int64, keys with the largest scores of those it attends to, -1 for none
    dropping: Tensor  # (b, H, r) bool, whether it may attend to other keys than these
    values: Tensor  # (b, H, n, d)


def refusal(base: AttentionCall, other: AttentionCall) -> str:
    """Return why two calls cannot be compared."""
    sizes = {
        "samples": (base.q.shape[0], other.q.shape[0]),
        "heads": (base.q.shape[1], other.q.shape[1]),
        "queries": (base.q.shape[2], other.q.shape[2]),
        "keys": (base.k.shape[2], other.k.shape[2]),
        "numbers in a value": (base.v.shape[3], other.v.shape[3]),
    }
    differences = [f"{one} {name} and {two}" for name, (one, two) in sizes.items() if one != two]
    return ", ".join(differences)


def head_changes(base: AttentionCall, other: AttentionCall, top: int) -> dict[str, Tensor]:
    """Compare the weights, scores and outputs of two attention calls."""
    batch, heads = base.q.shape[:2]
    sums = {name: torch.zeros(batch, heads, dtype=torch.float64, device=base.q.device) for name in SUMS}
    for samples, queries in _parts(base):
        one, two = (_rows(call.part(samples, queries), top) for call in (base, other))
        for name, values in _compared(one, two).items():
            if name == "largest":  # NaN stays
                sums[name][samples] = torch.maximum(sums[name][samples], values.amax(-1))
            else:
                sums[name][samples] += values.sum(-1)
    return sums


def _parts(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Yield samples and queries whose weights fit into memory."""
    batch, heads, length, _ = call.q.shape
    rows = min(length, max(1, _ENTRIES // (heads * call.k.shape[2])))
    samples = max(1, _ENTRIES // (heads * call.k.shape[2] * length))
    for first in range(0, batch, samples):
        for start in range(0, length, rows):
            yield slice(first, first + samples), slice(start, start + rows)


def _rows(part: AttentionCall, top: int) -> _Rows:
    """Score a part of a call."""
    scores = part.scores(torch.float64)
    allowed = torch.ones_like(scores, dtype=torch.bool) if part.allowed is None else part.allowed
    allowed = allowed.expand(scores.shape)
    kept = allowed if part.selected is None else allowed & as_mask(part.selected, scores.shape[-1])
    number = kept.sum(-1)
    seen = scores.masked_fill(~kept, -torch.inf)
    logits = seen
    if part.sinks is not None:
        sink = part.sinks.double()[None, :, None, None].expand(*seen.shape[:3], 1)
        logits = torch.cat([seen, sink], -1)
    weights = logits.softmax(-1)[..., : seen.shape[-1]]
    top = min(top, seen.shape[-1])
    order = largest_scores(seen, top)[1]
    ranks = torch.arange(top, device=seen.device)
    return _Rows(
        weights=weights.masked_fill(number[..., None] == 0, 0),
        attending=part.counted & (number > 0),
        dispersion=seen.amax(-1) - scores.masked_fill(~kept, torch.inf).amin(-1),
        top=order.masked_fill(ranks >= number[..., None], -1),
        dropping=allowed.sum(-1) > number.clamp(max=top),
        values=part.v.double().repeat_interleave(part.q.shape[1] // part.v.shape[1], 1),
    )


def _compared(base: _Rows, other: _Rows) -> dict[str, Tensor]:
    """Return terms per query (b, H, r), 0 if the query does not count."""
    counts = base.attending & other.attending
    by_weights, by_values = output_parts(base.weights, other.weights, base.values, other.values)
    output, after = base.weights @ base.values, other.weights @ other.values
    norms = {"output": output, "by_weights": by_weights, "by_values": by_values, "change": after - output}
    dropping = base.dropping | other.dropping
    chosen = (rows.top.flatten(0, 2).cpu() for rows in (base, other))
    overlap = overlaps(*chosen)[0].view(counts.shape).to(counts.device)
    variation = total_variation(base.weights, other.weights)
    terms = {
        "queries": torch.ones_like(variation),
        "total_variation": variation,
        "largest": variation,
        "dispersion_base": base.dispersion,
        "dispersion": other.dispersion,
        "moved": (other.dispersion - base.dispersion).abs(),
        "top_queries": dropping.double(),
        "overlap": overlap.where(dropping, 0.0),
        **{name: values.square().sum(-1) for name, values in norms.items()},
    }
    masked = {name: values.where(counts, 0.0) for name, values in terms.items()}
    return masked | {"left_out": (base.attending != other.attending).double()}
