"""Describe each head in a monitor: extremes over the rows that it looks at, before averaging hides them."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from semdiag.mathematics.softmax_secants import local_stability_of_weight
from semdiag.measuring.calls.counted_rows import CountedRows

# Quantities, and the bounds between which each must lie.
LIMITS = {
    "max_logit": (-math.inf, math.inf),
    "above": (0.0, 1.0),
    "entropy": (0.0, math.inf),
    "least_entropy": (0.0, math.inf),
    "first_key": (0.0, 1.0),
    "heaviest_key": (0.0, 1.0),
    "dispersion": (0.0, math.inf),
    "separation": (-math.inf, math.inf),
    "xi": (0.0, 0.5),
    "output_rank": (1.0, math.inf),
    "query_norm": (0.0, math.inf),
    "key_norm": (0.0, math.inf),
}
LARGEST, SMALLEST = (
    ("max_logit", "query_norm", "key_norm"),
    ("least_entropy",),
)  # extremes of rows; others are averages
OF_K = {"dispersion": (0.0, math.inf), "separation": (0.0, math.inf), "mass": (0.0, 1.0)}
PLACE = ("step", "layer", "head", "module", "occurrence", "rows")
LOGIT = 50.0  # nats: rows above it are counted unless a rule says otherwise


def head_columns(k: Sequence[int]) -> list[str]:
    """Return the column names of a monitor's table of heads."""
    return [*PLACE, *quantities(k), "alarm"]


def quantities(k: Sequence[int]) -> list[str]:
    """Return the names of the columns that are quantities."""
    return [*LIMITS, *(f"{name}_k{value}" for value in k for name in OF_K)]


def quantities_among(columns: Iterable[str]) -> list[str]:
    """Return the columns of a file that are quantities, those of any k included."""
    return [name for name in columns if name in LIMITS or re.fullmatch(rf"({'|'.join(OF_K)})_k\d+", name)]


def head_key(row: Mapping[str, Any]) -> str:
    """Return a row's layer, occurrence and head as a logger's key."""
    again = f".{row['occurrence']}" if row["occurrence"] else ""
    return f"layer_{row['layer']}{again}/head_{row['head']}"


def describe_heads(rows: CountedRows, k: Sequence[int], logit: float = LOGIT) -> list[dict[str, float | int]]:
    """Reduce the rows of a call to one row per head; NaN for a quantity that no row has."""
    statistics, used = rows.statistics, rows.attending
    weight = statistics.largest_weight()
    above = (statistics.kept_maximum > logit) | (statistics.non_finite > 0)
    medians = {
        "dispersion": statistics.dispersion(),
        "separation": statistics.separation(),
        "xi": local_stability_of_weight(weight),
    }
    for value in k:
        most = min(value, len(statistics.top_load))
        medians[f"dispersion_k{value}"] = statistics.dispersion(most)
        medians[f"separation_k{value}"] = statistics.separation(most)
        medians[f"mass_k{value}"] = statistics.mass_kept(most)
    values = {
        "max_logit": _largest_logits(rows),
        "above": _per_head(above.to(weight.dtype), used, "mean"),
        "entropy": _per_head(statistics.entropy, used, "mean"),
        "least_entropy": _per_head(statistics.entropy, used, "min"),
        "first_key": _per_head(rows.first_weight(), used, "mean"),
        "heaviest_key": _per_head(weight, used, "mean"),
        "output_rank": _output_rank(rows),
        "query_norm": _query_norms(rows),
        "key_norm": _key_norms(rows),
        **{name: _per_head(numbers, used, "median") for name, numbers in medians.items()},
    }
    counts = used.sum((0, 2)).tolist()
    names = quantities(k)
    return [
        {"head": head, "rows": count, **{name: values[name][head] for name in names}}
        for head, count in enumerate(counts)
    ]


def _per_head(values: Tensor, used: Tensor, what: str) -> list[float]:
    """Return one number per head over its rows that are used and finite; NaN if there are none."""
    numbers = []
    for head in range(values.shape[1]):
        own = values[:, head][used[:, head]].double()
        own = own[own.isfinite()]
        if not len(own):
            numbers.append(math.nan)
        elif what == "median":
            numbers.append(float(own.quantile(0.5)))
        else:
            numbers.append(float(getattr(own, what)()))
    return numbers


def _largest_logits(rows: CountedRows) -> list[float]:
    """Return the largest score of each head; +inf if one is not finite."""
    broken = ((rows.statistics.non_finite > 0) & rows.queries).any(2).any(0).tolist()
    largest = _per_head(rows.statistics.kept_maximum, rows.attending, "max")
    return [math.inf if lost else value for lost, value in zip(broken, largest, strict=True)]


def _query_norms(rows: CountedRows) -> list[float]:
    """Return the largest norm of a query that attends, by head; NaN where only the scores are known."""
    if not rows.call.factored:
        return [math.nan] * rows.call.q.shape[1]
    return _per_head(rows.call.q.float().norm(dim=-1), rows.attending, "max")


def _key_norms(rows: CountedRows) -> list[float]:
    """Return the largest norm of a key to which a query may attend, by query head; NaN as above."""
    if not rows.call.factored:
        return [math.nan] * rows.call.q.shape[1]
    norms = rows.call.k.float().norm(dim=-1)
    norms = norms.repeat_interleave(rows.call.q.shape[1] // norms.shape[1], 1)
    return _per_head(norms, rows.keys.expand_as(norms), "max")


def _output_rank(rows: CountedRows) -> list[float]:
    """Return e to the entropy of the normalised singular values of each head's outputs."""
    outputs = rows.call.mixed.double().transpose(0, 1).flatten(1, 2)  # (H, b · r, Dv)
    # A row without keys may be NaN.
    outputs = outputs.where(rows.attending.transpose(0, 1).flatten(1)[..., None], 0.0)
    tall = outputs.shape[1] > outputs.shape[2]
    gram = outputs.transpose(1, 2) @ outputs if tall else outputs @ outputs.transpose(1, 2)
    known = gram.isfinite().all((1, 2))
    spectrum = torch.linalg.eigvalsh(gram.where(known[:, None, None], 0.0)).clamp(min=0).sqrt()
    share = spectrum / spectrum.sum(1, keepdim=True)
    rank = torch.special.entr(share).sum(1).exp()  # NaN where all outputs are 0
    return [float(number) for number in rank.where(known, math.nan)]


def scalars(rows: Sequence[Mapping[str, Any]], k: Sequence[int]) -> dict[str, float]:
    """Return the numbers of one step for a logger: of every head, and the largest, smallest and median per layer."""
    logged: dict[str, float] = {}
    layers: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        place = head_key(row)
        for name in quantities(k):
            if not math.isnan(row[name]):
                logged[f"attention/{place}/{name}"] = row[name]
                layers.setdefault(place.split("/")[0], {}).setdefault(name, []).append(row[name])
    for layer, names in layers.items():
        for name, numbers in names.items():
            for how, number in (
                ("max", max(numbers)),
                ("min", min(numbers)),
                ("median", statistics.median(numbers)),
            ):
                logged[f"attention/{layer}/{name}/{how}"] = number
    return logged
