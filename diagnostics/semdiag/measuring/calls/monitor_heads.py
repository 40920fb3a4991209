"""What a monitor records in a look: quantities of layers and heads, reduced over ranks, and sent to loggers."""

import hashlib
import math
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.mathematics.row_statistics import RowStatistics
from semdiag.measuring.calls.counted_rows import CountedRows, Tensors, attended_keys, counted_rows
from semdiag.measuring.metrics import Metric, metric_columns, metric_of, monitored
from semdiag_files import InputError

PATIENCE = timedelta(minutes=5)  # longest wait of a look for other ranks; NCCL ends a training after 10


@dataclass(frozen=True)
class Look:
    """What one rank saw in one step."""

    step: int  # number of the step
    rows: list[dict[str, Any]]  # rows of the table of layers
    heads: list[dict[str, Any]]  # rows of the table of heads
    parts: dict[str, str]  # fingerprint of the rank's part of a module's weights, by module


class Ranks:
    """This process among those of torch.distributed; they communicate in a group of their own, on the CPU."""

    def __init__(self, ranks: str) -> None:
        if ranks not in ("all", "own"):
            raise InputError(f'ranks must be "all" or "own". Got {ranks!r}.')
        self._together = ranks == "all" and _several()
        self._wanted = ranks == "all"
        self.rank = dist.get_rank() if self._together else 0
        self._group: Any = None
        self.parts: dict[str, str] = {}  # fingerprints of this rank's part of weights, by module

    @property
    def joined(self) -> bool:
        """Whether looks wait for other ranks."""
        return self._group is not None

    @property
    def reports(self) -> bool:
        """Whether this process reports what all processes would report alike."""
        return self.rank == 0 or self._group is None

    def open(self, settings: Mapping[str, Any]) -> None:
        """Connect to the other ranks."""
        if self._wanted and not self._together and _several():
            warnings.warn(
                "The monitor was made before torch.distributed was initialised, so it sees its own process only. "
                "Make it after init_process_group.",
                stacklevel=3,
            )
        if not self._together or self._group is not None:
            return
        try:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
            settings_of_ranks = self._gathered(dict(settings))
        except (RuntimeError, ValueError) as error:
            self.leave()
            raise InputError(
                f"A monitor joins all ranks, but {_why(error)} when it started. Start it in every process, with "
                'gloo, or give it ranks="own".'
            ) from None
        for rank, their_settings in enumerate(settings_of_ranks):
            if unlike := [name for name in settings if settings[name] != their_settings[name]]:
                self.leave()
                (name, *_) = unlike
                raise InputError(
                    f"Monitors of all ranks look together: {name} is {settings[name]!r} in rank {self.rank} and "
                    f'{their_settings[name]!r} in rank {rank}. Give all the same value, or ranks="own".'
                )

    def together(self, look: Look) -> list[Look]:
        """Return every rank's look at a step, in rank order; this rank's alone if they cannot be reached."""
        if self._group is None:
            return [look]
        try:
            looks: list[Look] = self._gathered(look)
        except (RuntimeError, ValueError) as error:
            self._go_on_alone(look.step, _why(error))
            return [look]
        steps = [each.step for each in looks]
        if len(set(steps)) == 1:
            return looks
        self._go_on_alone(look.step, f"the ranks look at different steps ({', '.join(map(str, steps))})")
        return [look]

    def fail(self, step: int) -> None:
        """Tell the others that this rank's forward pass failed."""
        if self._group is not None:
            self._go_on_alone(step, "its forward pass failed")

    def part(self, model: nn.Module, name: str) -> None:
        """Note this rank's part of a module's weights when the module first attends."""
        if self._group is not None and name not in self.parts:
            self.parts[name] = _fingerprint(model, name)

    def leave(self) -> None:
        """Close the group, which other ranks notice at once."""
        if self._group is not None:
            with suppress(Exception):  # training may have closed all groups
                dist.destroy_process_group(self._group)
        self._group = None

    def _gathered(self, entry: Any) -> list[Any]:
        if (size := dist.get_world_size(self._group) if dist.is_initialized() else -1) < 1:
            raise RuntimeError("the training has closed its groups")
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, entry, group=self._group)
        return gathered

    def _go_on_alone(self, step: int, why: str) -> None:
        self.leave()
        warnings.warn(
            f"The monitor of rank {self.rank} looks at its own rank only from step {step} on: {why}.",
            stacklevel=4,
        )


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _why(error: Exception) -> str:
    """Return the reason for the failure of a collective operation, in words."""
    text = str(error)
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "another rank has ended or stopped its monitor"
    if "imed out" in text or "imeout" in text:
        return f"not every rank arrived within {PATIENCE.total_seconds():g} s"
    return f"the ranks could not be reached ({' '.join(text.split())[:120]})"


def _fingerprint(model: nn.Module, name: str) -> str:
    """Return a text that is equal in ranks with the same weights of a module, and almost never in others."""
    modules = {path.replace("_orig_mod", "").strip("."): module for path, module in model.named_modules()}
    while not (weights := _weights(modules[name]) if name in modules else []) and name:
        name = name.rpartition(".")[0]  # a module without weights takes those around it
    # numpy() would keep FSDP from freeing the weights
    return hashlib.sha256("".join(repr(weight.tolist()) for weight in weights).encode()).hexdigest()[:16]


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """Return a few values of each parameter, as this rank holds them while the module runs."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    samples = []
    left = [module]
    while left:
        module_left = left.pop()
        for parameter in module_left.parameters(recurse=False):
            held = parameter.detach()
            values = (held.to_local() if isinstance(held, DTensor) else held).reshape(-1)
            if len(values):  # training may have freed some
                samples.append(values[:: max(1, len(values) // 16)][:16])
        # Inner modules that FSDP wraps separately are freed again when attention runs.
        wrapped = FSDPModule, FullyShardedDataParallel
        left += [inner for inner in module_left.children() if not isinstance(inner, wrapped)]
    return samples


PLACE = ("step", "layer", "head", "module", "occurrence", "rows")
LOGIT = 50.0  # nats: rows above it are counted unless a rule gives another number


def head_columns(k: Sequence[int]) -> list[str]:
    """Return the column names of a monitor's table of heads."""
    return [*PLACE, *monitored_columns(k), "alarm"]


def monitored_columns(k: Sequence[int]) -> list[str]:
    """Return the names of the columns that are quantities."""
    return list(metric_columns(monitored(), k))


def quantities_among(columns: Iterable[str]) -> list[str]:
    """Return the columns of a file that are quantities, those of any k included."""
    metrics = {column: metric_of(column) for column in columns}
    return [
        column for column, metric_and_k in metrics.items() if metric_and_k is not None and metric_and_k[0].by_head
    ]


def head_key(row: Mapping[str, Any]) -> str:
    """Return a row's layer, occurrence and head as a logger's key."""
    occurrence = f".{row['occurrence']}" if row["occurrence"] else ""
    return f"layer_{row['layer']}{occurrence}/head_{row['head']}"


def looked_at(rows: CountedRows) -> Tensors:
    """Return what is described of rows, on their device: :func:`describe_layer` and :func:`describe_heads`."""
    tensors = {field.name: getattr(rows.statistics, field.name) for field in fields(RowStatistics)}
    tensors |= {name: tensors[name][..., :0] for name in ("load", "top_keys", "top_load")}  # only K is used
    tensors |= {"queries": rows.queries, "attending": rows.attending}
    for metric in monitored():
        if metric.of_call is not None:
            tensors[metric.name] = values = metric.of_call(rows, None)
            if metric.per == "key":  # reduced here: keys are many
                tensors[metric.name] = _of_head(metric, values, rows.keys.expand_as(values))
    return tensors


def describe_heads(tensors: Tensors, k: Sequence[int], logit: float = LOGIT) -> list[dict[str, float | int]]:
    """Return one row per head for a call's rows; NaN for a quantity that no row has."""
    statistics = _statistics(tensors)
    attending = tensors["attending"]
    columns = {}
    for column, (metric, limit) in metric_columns(monitored(), k).items():
        values = _values(metric, limit, tensors, statistics)
        reduced = metric.of_call is not None and metric.per == "key"
        columns[column] = values if reduced else _of_head(metric, values, attending, logit)
    broken = ((statistics.non_finite > 0) & tensors["queries"]).any(2).any(0)
    columns["max_logit"] = columns["max_logit"].masked_fill(broken, math.inf)
    counts = attending.sum((0, 2)).tolist()
    table = torch.stack([*columns.values()], 1).tolist()
    return [
        {"head": head, "rows": count, **dict(zip(columns, row, strict=True))}
        for head, (count, row) in enumerate(zip(counts, table, strict=True))
    ]


def _statistics(tensors: Tensors) -> RowStatistics:
    return RowStatistics(**{field.name: tensors[field.name] for field in fields(RowStatistics)})


def _values(metric: Metric, k: int | None, tensors: Tensors, statistics: RowStatistics) -> Tensor:
    """Return the values of a metric, of the rows that arrived from their device."""
    if metric.of_rows is None:
        return tensors[metric.name]
    if k is not None:
        k = min(k, len(statistics.top_load))  # there may be fewer keys
    return metric.of_rows(statistics, k)


def _of_head(metric: Metric, values: Tensor, used: Tensor, logit: float = LOGIT) -> Tensor:
    """Return a metric's number of each head (H,), of its values (B, H, R) at the rows that are used."""
    if metric.by_head == "rank":
        return _rank(values)
    if metric.by_head == "share above":
        return _per_head((values > logit).double(), used, "mean")
    return _per_head(values, used, metric.by_head)


def _per_head(values: Tensor, used: Tensor, statistic: str) -> Tensor:
    """Return one number per head (H,) over its rows (B, H, R) that are used and finite; NaN if there are none."""
    values = values.double().transpose(0, 1).flatten(1)
    finite = used.transpose(0, 1).flatten(1) & values.isfinite()
    count = finite.sum(1)
    if not values.shape[1]:
        return values.new_full((len(values),), math.nan)
    if statistic == "median":
        ordered = values.where(finite, math.inf).sort(1).values
        middle = torch.stack([(count - 1).clamp(min=0), count], 1).div(2, rounding_mode="floor")
        low, high = ordered.gather(1, middle).unbind(1)
        return (low + (high - low) / 2).masked_fill(count == 0, math.nan)
    if statistic == "mean":
        return values.where(finite, 0).sum(1) / count
    sign = 1 if statistic == "max" else -1
    return (sign * (sign * values).where(finite, -math.inf).amax(1)).masked_fill(count == 0, math.nan)


def _rank(products: Tensor) -> Tensor:
    """Return e to the entropy of the normalised singular values of each head's outputs; NaN where all are 0."""
    finite = products.isfinite().all((1, 2))
    spectrum = torch.linalg.eigvalsh(products.where(finite[:, None, None], 0.0)).clamp(min=0).sqrt()
    share = spectrum / spectrum.sum(1, keepdim=True)
    entropy: Tensor = torch.special.entr(share).sum(1)
    return entropy.exp().masked_fill(~finite, math.nan)


def scalars(rows: Sequence[Mapping[str, Any]], k: Sequence[int]) -> dict[str, float]:
    """Return the numbers of one step for a logger: by head, and the largest, smallest and median per layer."""
    logged: dict[str, float] = {}
    layers: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        place = head_key(row)
        for name in monitored_columns(k):
            if not math.isnan(row[name]):
                logged[f"attention/{place}/{name}"] = row[name]
                layers.setdefault(place.split("/")[0], {}).setdefault(name, []).append(row[name])
    for layer, names in layers.items():
        for name, numbers in names.items():
            for statistic, extreme in (("max", max), ("min", min), ("median", statistics.median)):
                logged[f"attention/{layer}/{name}/{statistic}"] = extreme(numbers)
    return logged


class Reduction:
    """Combines the looks of all ranks; every rank gets the same result."""

    def __init__(self) -> None:
        # number of heads of earlier parts, by module and part of its weights
        self._heads_before: dict[tuple[str, str], int] = {}

    def __call__(self, looks: Sequence[Look]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows of layers and of heads of one step, from the ranks' looks in rank order."""
        if len(looks) == 1:
            return looks[0].rows, looks[0].heads
        layers: dict[str, int] = {}
        for look in looks:
            for row in look.rows:
                layers.setdefault(row["module"], row["layer"])
        if len(set(layers.values())) < len(layers):  # ranks with other modules also number them from 0
            layers = {module: layer for layer, module in enumerate(layers)}
        rows = [row | {"layer": layers[row["module"]]} for look in looks for row in look.rows]
        heads = [row | {"layer": layers[row["module"]]} for look in looks for row in self._numbered(look)]
        return _reduced(rows, ["module", "occurrence"]), _reduced(heads, ["module", "occurrence", "head"])

    def _numbered(self, look: Look) -> list[dict[str, Any]]:
        """Return a rank's rows of heads, numbered after those of other parts of the same module."""
        count: dict[tuple[str, str], int] = {}
        places = [(row["module"], look.parts.get(row["module"], "")) for row in look.heads]
        for row, at in zip(look.heads, places, strict=True):
            count[at] = max(count.get(at, 0), row["head"] + 1)
        numbers_before = self._heads_before
        for (module, part), heads in count.items():
            if (module, part) not in numbers_before:
                numbers_before[module, part] = numbers_before.get((module, "all"), 0)
                numbers_before[module, "all"] = numbers_before[module, part] + heads
        return [
            row | {"head": row["head"] + numbers_before[at]} for row, at in zip(look.heads, places, strict=True)
        ]


def _reduction(column: str) -> str:
    """Return how a monitor's column is made of rows; empty for a column that is no metric."""
    metric_and_k = metric_of(column)
    return metric_and_k[0].by_head if metric_and_k else ""


def _reduced(rows: list[dict[str, Any]], place: list[str]) -> list[dict[str, Any]]:
    """Return one row per module, occurrence and head, in the order of a single process."""
    if not rows:
        return []
    table = pd.DataFrame(rows)
    table["order"] = table.groupby(["module", "occurrence"], sort=False).ngroup()
    by = [table[name] for name in place]
    names = [str(name) for name in table if name not in (*PLACE, "order")]
    largest = [name for name in names if _reduction(name) == "max"]
    smallest = [name for name in names if _reduction(name) == "min"]
    means = [name for name in names if name not in (*largest, *smallest)]
    weights = table[means].notna().mul(table["rows"], axis=0)
    sums = (table[means].fillna(0.0) * weights).groupby(by, sort=False).sum()
    groups = table.groupby(place, sort=False)
    joined = pd.concat(
        [
            groups[["step", "layer", "order"]].first(),
            groups["rows"].sum(),
            sums / weights.groupby(by, sort=False).sum(),
            groups[largest].max(),
            groups[smallest].min(),
        ],
        axis=1,
    )
    joined = joined.reset_index().sort_values(["order", *place[2:]], kind="stable").drop(columns="order")
    return [{str(name): value for name, value in row.items()} for row in joined.to_dict("records")]


_SAMPLES = 4  # samples looked at per attention call: score rows = samples × queries × heads


def columns(k: Sequence[int]) -> list[str]:
    """Return the column names of a monitor's table."""
    medians = list(metric_columns(_medians(), ()))
    of_k = list(metric_columns(_medians(), k))[len(medians) :]
    return ["step", "layer", "module", "occurrence", "rows", "keys", *medians, "entropy", *of_k]


def _medians() -> list[Metric]:
    return [metric for metric in monitored() if metric.by_head == "median"]


def sampled_rows(
    call: AttentionCall, k: Sequence[int], generator: torch.Generator, queries: int | None = 8
) -> CountedRows:
    """Return a few random rows of an attention call, or all of them."""
    largest_k = min(max(k, default=0), call.k.shape[2])
    call = replace(call, v=call.v[..., :0])  # values are unused: copy none
    if queries is None:
        return counted_rows(call, top=largest_k)
    batch, _, length, _ = call.q.shape
    draws = (torch.randperm(size, generator=generator)[:n] for size, n in ((batch, _SAMPLES), (length, queries)))
    b, r = (indices.sort().values.to(call.q.device, non_blocking=True) for indices in draws)
    samples = slice(None) if batch <= _SAMPLES else b  # a slice copies no keys
    rows = counted_rows(call.part(samples, r), top=largest_k)  # the scores of these rows alone
    return replace(rows, real_keys=attended_keys(call, samples))


def describe_layer(tensors: Tensors, k: Sequence[int]) -> dict[str, float | int]:
    """Return medians over the rows that count and have keys; NaN for a quantity that no row has."""
    statistics = _statistics(tensors)
    values = {"keys": statistics.keys.to(statistics.entropy.dtype), "entropy": statistics.entropy}
    for column, (metric, limit) in metric_columns(_medians(), k).items():
        values[column] = _values(metric, limit, tensors, statistics)
    joined = tensors["attending"].transpose(1, 2).flatten()[None, None]  # all heads together
    medians: dict[str, float | int] = {"rows": int(joined.sum())}
    for name, numbers in values.items():
        medians[name] = float(_per_head(numbers.transpose(1, 2).flatten()[None, None], joined, "median"))
    return medians
