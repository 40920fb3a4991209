"""What a monitor sees of each head: extremes over the rows that it looks at, before they are averaged away."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from semdiag.mathematics.softmax_secants import local_stability_of_weight
from semdiag.measuring.calls.counted_rows import CountedRows

# Quantities, and the ends between which each lies whatever a model does.
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
LOGIT = 50.0  # nats: above which rows are counted where no rule says


def head_columns(k: Sequence[int]) -> list[str]:
    """Names of the columns of a monitor's table of heads."""
    return [*PLACE, *quantities(k), "alarm"]


def quantities(k: Sequence[int]) -> list[str]:
    """Names of the columns that are quantities."""
    return [*LIMITS, *(f"{name}_k{value}" for value in k for name in OF_K)]


def head_key(row: Mapping[str, Any]) -> str:
    """Where a row is of, in a logger's words.

    Example:
        >>> head_key({"layer": 3, "head": 5, "occurrence": 0})
        'layer_3/head_5'
    """
    again = f".{row['occurrence']}" if row["occurrence"] else ""
    return f"layer_{row['layer']}{again}/head_{row['head']}"


def describe_heads(rows: CountedRows, k: Sequence[int], logit: float = LOGIT) -> list[dict[str, float | int]]:
    """Reduce the rows of a call to a row for each head; NaN where no row has a quantity.

    max_logit: the largest score of a query and a key that it attends to (nats; scale and bias included; +inf
    where a score is not finite). above: share of the rows whose largest score is above ``logit`` or
    one of whose scores is not finite. entropy
    (mean), least_entropy: of the weights, nats. first_key, heaviest_key: mean weights on the first key that is
    no padding, and on the heaviest key of each row. dispersion δ, separation Δ, xi: medians. output_rank: e to
    the entropy of the singular values of the head's outputs on these rows, each divided by their sum.
    query_norm, key_norm: the largest.

    Source: Roy and Vetterli 2007 for the effective rank. Deviation: none.

    Args:
        rows: of one attention call, (b, H, r).
        k: counterfactual numbers of heavy hitters.
        logit: threshold of ``above``.

    Returns:
        One dictionary per head, with ``head`` and ``rows``.
    """
    found, used = rows.statistics, rows.attending
    weight = found.largest_weight()
    above = (found.kept_maximum > logit) | (found.non_finite > 0)
    medians = {
        "dispersion": found.dispersion(),
        "separation": found.separation(),
        "xi": local_stability_of_weight(weight),
    }
    for value in k:
        most = min(value, len(found.top_load))
        medians[f"dispersion_k{value}"] = found.dispersion(most)
        medians[f"separation_k{value}"] = found.separation(most)
        medians[f"mass_k{value}"] = found.mass_kept(most)
    values = {
        "max_logit": _largest_logits(rows),
        "above": _each(above.to(weight.dtype), used, "mean"),
        "entropy": _each(found.entropy, used, "mean"),
        "least_entropy": _each(found.entropy, used, "min"),
        "first_key": _each(rows.first_weight(), used, "mean"),
        "heaviest_key": _each(weight, used, "mean"),
        "output_rank": _output_rank(rows),
        "query_norm": _each(rows.call.q.float().norm(dim=-1), rows.queries, "max"),
        "key_norm": _key_norms(rows),
        **{name: _each(numbers, used, "median") for name, numbers in medians.items()},
    }
    counts = used.sum((0, 2)).tolist()
    names = quantities(k)
    return [
        {"head": head, "rows": count, **{name: values[name][head] for name in names}}
        for head, count in enumerate(counts)
    ]


def _each(values: Tensor, used: Tensor, what: str) -> list[float]:
    """One number for each head over its rows that are used and finite."""
    found = []
    for head in range(values.shape[1]):
        own = values[:, head][used[:, head]].double()
        own = own[own.isfinite()]
        if not len(own):
            found.append(math.nan)
        elif what == "median":
            found.append(float(own.quantile(0.5)))
        else:
            found.append(float(getattr(own, what)()))
    return found


def _largest_logits(rows: CountedRows) -> list[float]:
    """The largest score by head; +inf where one is not a finite number."""
    broken = ((rows.statistics.non_finite > 0) & rows.queries).any(2).any(0).tolist()
    largest = _each(rows.statistics.kept_maximum, rows.attending, "max")
    return [math.inf if lost else value for lost, value in zip(broken, largest, strict=True)]


def _key_norms(rows: CountedRows) -> list[float]:
    """The largest norm of a key that a row may attend to, by query head."""
    norms = rows.call.k.float().norm(dim=-1)
    norms = norms.repeat_interleave(rows.call.q.shape[1] // norms.shape[1], 1)
    return _each(norms, rows.keys.expand_as(norms), "max")


def _output_rank(rows: CountedRows) -> list[float]:
    """e to the entropy of the normalised singular values of each head's outputs."""
    outputs = rows.call.mixed.double().transpose(0, 1).flatten(1, 2)  # (H, b · r, Dv)
    outputs = outputs * rows.attending.transpose(0, 1).flatten(1)[..., None]
    tall = outputs.shape[1] > outputs.shape[2]
    gram = outputs.transpose(1, 2) @ outputs if tall else outputs @ outputs.transpose(1, 2)
    known = gram.isfinite().all((1, 2))
    spectrum = torch.linalg.eigvalsh(gram.where(known[:, None, None], 0.0)).clamp(min=0).sqrt()
    share = spectrum / spectrum.sum(1, keepdim=True)
    rank = torch.special.entr(share).sum(1).exp()  # NaN where all outputs are 0
    return [float(number) for number in rank.where(known, math.nan)]


def scalars(rows: Sequence[Mapping[str, Any]], k: Sequence[int]) -> dict[str, float]:
    """The numbers of one step for a logger: of every head, and per layer largest, smallest and median.

    Args:
        rows: of the table of heads, of one step.
        k: counterfactual numbers of heavy hitters.

    Returns:
        By keys like ``attention/layer_3/head_5/max_logit`` and ``attention/layer_3/max_logit/max``.

    Example:
        >>> place = {"layer": 0, "occurrence": 0, **dict.fromkeys(LIMITS, math.nan)}
        >>> found = scalars([{**place, "head": 0, "entropy": 1.0}, {**place, "head": 1, "entropy": 3.0}], ())
        >>> found["attention/layer_0/head_1/entropy"], found["attention/layer_0/entropy/median"]
        (3.0, 2.0)
    """
    found: dict[str, float] = {}
    layers: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        place = head_key(row)
        for name in quantities(k):
            if not math.isnan(row[name]):
                found[f"attention/{place}/{name}"] = row[name]
                layers.setdefault(place.split("/")[0], {}).setdefault(name, []).append(row[name])
    for layer, names in layers.items():
        for name, numbers in names.items():
            for how, number in (
                ("max", max(numbers)),
                ("min", min(numbers)),
                ("median", statistics.median(numbers)),
            ):
                found[f"attention/{layer}/{name}/{how}"] = number
    return found
