"""What a k-sweep keeps of every query while a model runs, and every quantity of every k that follows from it."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch
from semdiag.capturing.call_strips import allowed_mask
from semdiag.mathematics.paper_stability import log_paper_heavy_hitter
from semdiag.mathematics.sampled_intervals import PER_STRATUM, TARGETS, sampled_estimates
from semdiag.mathematics.score_strips import rows_of
from semdiag.mathematics.softmax_stability import fixed_mask_stability, heavy_hitter_stability
from semdiag.measuring.calls.collector import QueryDraws, SampleNumbers, tie_width
from semdiag.measuring.calls.counted_rows import counted_rows
from semdiag.measuring.outputs import Streams, output_changes, output_ks
from semdiag.measuring.percentiles import COLUMNS, rank_error, summaries
from semdiag.measuring.table import ALL

_CHANGES = ("head_change", "stream_change")
_ESTIMATED = ("dispersion", "ratio", "separation", "weight_kept", "weight_kept_without_first", *_CHANGES)
_MOST_NUMBERS = 64_000_000  # held at once of queries, and of keys: 0.26 GB each
_HEADS = 2**16  # no layer has as many
_UNUSED = 2.0  # luck of a row that does not count: above every share
Columns = dict[str, Tensor]


class Rows:
    """Rows of queries, or of keys, by layer and head: all up to a limit, then a share beside totals of all."""

    def __init__(self, seed: int, stream: int, ks: Sequence[int], output_ks: Sequence[int]) -> None:
        self.share = 1.0  # probability with which a row is held; halved whenever there are too many
        self._ks = ks
        self._output_ks = output_ks
        self._seed = seed
        self._stream = stream
        self._held = 0
        self._whole: list[tuple[int, Columns]] = []  # (…, H, N) of each call, while all rows are held
        self._drawn: list[Columns] = []  # (…, n), afterwards
        # generators of luck, by layer and head; they follow the rows, whatever the batches
        self._dice: dict[tuple[int, int], np.random.Generator] = {}
        self._totals: dict[tuple[int, str, int], Tensor] = {}  # by k, quantity and layer: see _totals

    def add(self, layer: int, columns: Columns, counted: Tensor) -> None:
        """Add the rows of a call, (…, H, N), of which those count that ``counted`` (H, N) says."""
        sizes = counted.sum(1).tolist()
        if not sum(sizes):
            return
        luck = torch.from_numpy(np.concatenate([self._rolled(layer, head, n) for head, n in enumerate(sizes)]))
        luck = luck.to(counted.device)
        if all(n == counted.shape[1] for n in sizes):
            luck = luck.view(counted.shape)
        else:  # rows that do not count may hold anything: they repeat the first one that does
            some = counted.flatten().nonzero()[:, 0]
            rows = torch.full((counted.numel(),), int(some[0]), device=some.device)
            rows[some] = some
            columns = {name: x.flatten(-2)[..., rows].view(x.shape) for name, x in columns.items()}
            luck = torch.full(counted.shape, _UNUSED, device=some.device).masked_scatter_(counted, luck)
        part = {**{name: x.contiguous() for name, x in columns.items()}, "luck": luck}
        if self.share < 1:
            self._count(layer, part)
            self._drawn.append(_drawn(layer, part, self.share))
            self._held += _size(self._drawn[-1])
        else:
            self._whole.append((layer, part))
            self._held += _size(part)
        while self._held > _MOST_NUMBERS:
            for layer_and_part in self._whole:
                self._count(*layer_and_part)
            self.share /= 2
            self._drawn = [_chosen(part, part["luck"] < self.share) for part in self._drawn]
            while self._whole:
                self._drawn.append(_drawn(*self._whole.pop(0), self.share))
            self._held = sum(map(_size, self._drawn))

    def _rolled(self, layer: int, head: int, size: int) -> NDArray[np.float32]:
        seed = [number + 1 for number in (self._seed, layer, head, self._stream)]  # a layer may be unknown, -1
        dice = self._dice.setdefault((layer, head), np.random.default_rng(seed))
        return dice.random(size, dtype=np.float32)

    def _count(self, layer: int, part: Columns) -> None:
        used = part["luck"] < _UNUSED
        for k, name, values in sweep_quantities(part, self._ks, self._output_ks):
            totals = [_totals(values, used)]
            if (k, name, layer) in self._totals:
                totals.append(self._totals[k, name, layer])
            self._totals[k, name, layer] = _joint(torch.stack(totals))

    def held(self) -> Columns:
        """Return what is held, (…, n), in the order of layers and heads; ``place`` numbers these."""
        parts = [*self._drawn, *(_drawn(*undrawn, 1) for undrawn in self._whole)]
        self._drawn = parts
        self._whole = []
        home = parts[0]["place"].device  # layers may be on several devices
        names = [*parts[0]]
        order = torch.cat([part["place"].to(home) for part in parts]).argsort(stable=True)
        joined = {name: torch.cat([part.pop(name).to(home) for part in parts], -1)[..., order] for name in names}
        self._drawn = [joined]
        return joined

    @property
    def fewest(self) -> int:
        """The smallest number of rows that is held of a head."""
        return int(_sizes(self.held()["place"])[1].min())

    def table(self) -> pd.DataFrame:
        """Return the percentiles of all quantities for each k, by layer and head, then pooled."""
        held = self.held()
        codes, sizes = _sizes(held["place"])
        layers = codes.div(_HEADS, rounding_mode="floor")
        heads = codes.remainder(_HEADS)
        names = list[tuple[int, str]]()
        rows = list[Tensor]()
        for k, name, values in sweep_quantities(held, self._ks, self._output_ks):
            rows.append(torch.cat([summaries(_by_place(values, sizes), sizes), summaries(values[None])]))
            if self.share < 1:
                totals = self._of_places(k, name, layers, heads)
                defined = totals[:, :1] - totals[:, 1:2]
                ends = totals[:, 4:].masked_fill(defined == 0, math.nan)  # none where nothing is defined
                rows[-1][:, _EXACT] = torch.cat([totals[:, :3], totals[:, 3:4] / defined, ends], 1)
            names.append((k, name))
        numbers = torch.stack(rows, 1).flatten(0, 1).cpu().numpy()  # (places + 1) · quantities
        table = pd.DataFrame(numbers, columns=[*COLUMNS]).astype(dict.fromkeys(_COUNTS, np.int64))
        places = (torch.cat([x, x.new_tensor([ALL])]).cpu().numpy().repeat(len(names)) for x in (layers, heads))
        ks, quantity = (np.tile(np.array(each), len(codes) + 1) for each in zip(*names, strict=True))
        return table.assign(**dict(zip(("layer", "head"), places, strict=True)), k=ks, quantity=quantity)

    def _of_places(self, k: int, name: str, layers: Tensor, heads: Tensor) -> Tensor:
        """Return the totals of a quantity by layer and head, then of all, (places + 1, 6)."""
        of_layers = {layer: x for (at, quantity, layer), x in self._totals.items() if (at, quantity) == (k, name)}
        starts = np.cumsum([0, *map(len, of_layers.values())])
        first = dict(zip(of_layers, starts.tolist(), strict=False))
        every = torch.cat([x.to(heads.device) for x in of_layers.values()])
        at = torch.tensor([first[layer] for layer in layers.tolist()], device=heads.device) + heads
        return torch.cat([every[at], _joint(every)[None]])


_EXACT = [COLUMNS.index(name) for name in ("queries", "undefined", "not_positive", "mean", "p0", "p100")]
_COUNTS = ("queries", "undefined", "not_positive")


def _totals(values: Tensor, used: Tensor) -> Tensor:
    """Return numbers of rows, undefined and not positive ones, sum and extremes of each head, (H, 6)."""
    finite = values.isfinite() & used
    counts = [x.sum(1).double() for x in (used, used & ~finite, finite & (values <= 0))]
    low, high = (values.where(finite, end) for end in (math.inf, -math.inf))
    return torch.stack([*counts, values.where(finite, 0).sum(1), low.amin(1), high.amax(1)], 1)


def _joint(totals: Tensor) -> Tensor:
    return torch.cat([totals[..., :4].sum(0), totals[..., 4:5].amin(0), totals[..., 5:].amax(0)], -1)


def _by_place(values: Tensor, sizes: Tensor) -> Tensor:
    """Return values in the order of places as rows, padded at their ends."""
    most = int(sizes.max())
    if len(values) == most * len(sizes):
        return values.view(len(sizes), most)
    rows = values.new_full((len(sizes), most), math.nan)
    return rows.masked_scatter_(torch.arange(most, device=values.device) < sizes[:, None], values)


def _sizes(places: Tensor) -> tuple[Tensor, Tensor]:
    runs: tuple[Tensor, Tensor] = torch.unique_consecutive(places, return_counts=True)
    return runs


def _size(part: Columns) -> int:
    return sum(x.numel() for x in part.values())


def _drawn(layer: int, part: Columns, share: float) -> Columns:
    """Return the rows of a call that luck draws, (…, n), and the place of each."""
    heads = torch.arange(len(part["luck"]), device=part["luck"].device)
    place = (layer * _HEADS + heads)[:, None].expand_as(part["luck"])
    return _chosen(
        {name: x.flatten(-2) for name, x in (part | {"place": place}).items()}, part["luck"].flatten() < share
    )


def _chosen(part: Columns, some: Tensor) -> Columns:
    rows = some.nonzero()[:, 0]
    return {name: x.index_select(-1, rows) for name, x in part.items()}


def sweep_quantities(
    part: Columns, ks: Sequence[int], output_ks: Sequence[int]
) -> Iterator[tuple[int, str, Tensor]]:
    """Yield every quantity of every k in float64, over the queries or keys of columns (…, n)."""
    if "load" in part:
        yield from ((k, "load", values.double()) for k, values in zip(ks, part["load"], strict=False))
        return
    top = part["top"]
    full_range = part["range"].double()
    keys = part["keys"]
    yield 0, "dispersion", full_range
    yield 0, "ln_sound", fixed_mask_stability(full_range, keys).log_value
    highest = top[0].double()
    log_sum_besides = part["others"].double().where(keys > 1, 0)
    mass = torch.zeros_like(full_range)
    besides = torch.zeros_like(full_range)
    for k in range(1, ks[-1] + 1):
        score = top[k - 1].double()
        drops = keys > k  # where nothing is dropped scores may be -inf
        mass += (score - part["log_sum_exp"]).exp()
        besides += (score.masked_fill(part["first_rank"] == k - 1, -math.inf) - log_sum_besides).exp()
        if k not in ks:
            continue
        lowest = score.where(drops, 0)
        following = top[k].double().where(drops, 0)
        dispersion = (highest - lowest).where(drops, full_range)
        gap = lowest - following
        separation = gap.where(gap > part["rounding"], 0).masked_fill(~drops, math.inf)
        row = dispersion, separation, keys.clamp(max=k)
        yield k, "dispersion", dispersion
        yield k, "ratio", (dispersion / full_range).masked_fill(~(drops & (full_range > 0)), math.nan)
        yield k, "separation", separation
        yield k, "weight_kept", mass.clamp(max=1).masked_fill(~drops, math.nan)
        yield k, "weight_kept_without_first", besides.clamp(max=1).masked_fill(~drops, math.nan)
        for name in _CHANGES:
            if name in part and k in output_ks:
                yield k, name, part[name][output_ks.index(k)].double().masked_fill(~drops, math.nan)
        yield k, "ln_sound", heavy_hitter_stability(*row).log_value
        yield k, "ln_paper", log_paper_heavy_hitter(*row)


# of a table, after which quantities of one k are ordered
_ORDER = (
    "dispersion", "ratio", "separation", "weight_kept", "weight_kept_without_first", *_CHANGES, "load",
    "ln_sound", "ln_paper",
)  # fmt: skip


@dataclass
class TopScores:
    """Top scores, range, number of keys, log-sum-exp and changes of every query; loads of every key."""

    largest: int  # K
    draws: QueryDraws  # which queries are looked at
    min_keys: int = 1  # queries with fewer keys are left out
    every_k: bool = True  # whether the table has every k up to K, and not only those at which outputs are computed
    # whether the keys are those that the model's own mask keeps, and not all that it chooses among
    own_keys: bool = False
    run: tuple[int, ...] = ()  # the k that the model is run with
    batches: Sequence[Batch] = ()  # the inputs
    pieces: Mapping[int, Sequence[Batch]] = field(default_factory=dict)  # the batches cut into pieces, by length
    streams: Streams = field(default_factory=Streams)  # residual streams of the model
    seconds: float = 0.0  # duration of the pass
    most_keys: int = 0  # the most that a query has
    samples: SampleNumbers = field(default_factory=SampleNumbers)  # their numbers; each batch is to be begun

    def __post_init__(self) -> None:
        self._output_ks = output_ks(self.largest, self.run)
        self._ks = [*range(1, self.largest + 1)] if self.every_k else [*self._output_ks]
        self.queries, self.keys = (Rows(self.draws.seed, n, self._ks, self._output_ks) for n in (0, 1))

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Time the pass, and follow the stream of what runs."""
        started = time.perf_counter()
        with self.streams.watched(module):
            yield
        self.seconds = time.perf_counter() - started

    def start(self, samples: int) -> None:
        """Start a batch with so many samples."""
        self.samples.start(samples)

    def add(self, call: AttentionCall) -> None:
        """Keep what a call says of its queries and keys, or of a share of them where all are too many."""
        places = self.draws.places(call)
        if self.own_keys and call.selected is not None:
            call = replace(call, allowed=allowed_mask(call.part()), causal=False, first_query=0)
        stream = self.streams.of(call) if call.selected is None or self.own_keys else None
        rows = counted_rows(replace(call, selected=None), self.largest, places)
        changes = output_changes(rows, self._output_ks, stream)
        statistics = rows.statistics
        self.most_keys = max(self.most_keys, int(statistics.keys.max()))
        rounding = tie_width(call, statistics.maximum.dtype)
        if places is not None:
            rounding = rows_of(rounding[..., None], places)[..., 0]
        columns = {
            "rounding": rounding,
            "top": statistics.top.movedim(-1, 0),
            "range": statistics.maximum - statistics.minimum,
            "keys": statistics.keys,
            "log_sum_exp": statistics.log_sum_exp,
            **{name: values if values.ndim == 3 else values.movedim(-1, 0) for name, values in changes.items()},
        }
        if places is not None:
            numbers = torch.from_numpy(self.samples.of(len(call.q))).to(call.q.device)
            shape = places.shape
            index = torch.arange(places.shape[2], device=call.q.device)
            columns["sample"] = numbers[:, None, None].expand(shape)
            columns["stratum"] = index.div(PER_STRATUM, rounding_mode="floor").expand(shape)
        counted = rows.attending & (statistics.keys >= self.min_keys)
        self.queries.add(call.layer, {n: _by_head(x) for n, x in columns.items()}, _by_head(counted))
        loads = statistics.top_load[[k - 1 for k in self._ks]]
        self.keys.add(call.layer, {"load": _by_head(loads)}, _by_head(rows.keys))

    @property
    def thinned(self) -> str:
        """Say which share of queries and keys was drawn, and how far off percentiles may be; empty of all."""
        some = {name: x for name, x in (("queries", self.queries), ("keys", self.keys)) if x.share < 1}
        if not some:
            return ""
        shares = " and ".join(f"one in {round(1 / x.share)} {name}" for name, x in some.items())
        error = max(rank_error(x.fewest) for x in some.values())
        return (
            f"percentiles of the sweep by k are those of {shares}, drawn by chance (seed {self.draws.seed}): of a "
            f"head off by at most {error:.1%} in rank (99% confidence); counts, means and extremes are of all"
        )

    def estimates(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the table of estimates, pooled; only for drawn queries."""
        held = self.queries.held()
        samples = held["sample"].cpu().numpy()
        key = torch.stack([held["place"], held["sample"], held["stratum"]], 1)
        strata = torch.unique(key, dim=0, return_inverse=True)[1].cpu().numpy()
        for k, quantity, values in sweep_quantities(held, self._ks, self._output_ks):
            if quantity not in _ESTIMATED or k > self._most:
                continue
            each = values.cpu().numpy()
            for estimate in sampled_estimates(each, samples, strata, self.draws.share, (5, 50, 95)):
                for target, (low, high) in zip(TARGETS, (estimate.these, estimate.such), strict=True):
                    row = {"k": k, "quantity": quantity, "statistic": estimate.statistic, "target": target}
                    yield {**row, "estimate": estimate.estimate, "low": low, "high": high}

    def table(self) -> pd.DataFrame:
        """Return the table without the column model: all quantities for each k, by head, then pooled."""
        table = pd.concat([self.queries.table(), self.keys.table()], ignore_index=True)
        table = table[table["k"] <= self._most]
        order = pd.DataFrame(
            {
                "pooled": table["layer"] == ALL,
                **{n: table[n] for n in ("layer", "head", "k")},
                "quantity": table["quantity"].map(_ORDER.index),
            }
        )
        return table.loc[order.sort_values([*order], kind="stable").index].reset_index(drop=True)

    @property
    def _most(self) -> int:
        """The largest k of the table: of a model's own keys none that all queries have."""
        return min(self.largest, max(1, self.most_keys - 1)) if self.own_keys else self.largest


def _by_head(values: Tensor) -> Tensor:
    """Return (…, B, H, N) as (…, H, B · N); where torch has no float64 on the device, on the CPU."""
    values = values.cpu() if values.device.type == "mps" else values
    return values.transpose(-3, -2).flatten(-2)
