"""What a k-sweep keeps of every query while a model runs, and every quantity of every k that follows from it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.kept_keys import allowed_keys
from semdiag.mathematics.paper_stability import log_paper_heavy_hitter
from semdiag.mathematics.sampled_intervals import PER_STRATUM, TARGETS, sampled_estimates
from semdiag.mathematics.softmax_stability import fixed_mask_stability, heavy_hitter_stability
from semdiag.measuring.calls.collector import QueryDraws, SampleNumbers
from semdiag.measuring.calls.counted_rows import counted_rows
from semdiag.measuring.probe import percentile_columns
from semdiag.measuring.table import ALL
from semdiag.questions.k_sweep.outputs import Streams, output_changes, output_ks

_CHANGES = ("head_change", "stream_change")
_ESTIMATED = ("dispersion", "ratio", "separation", "mass", "mass_without_first", *_CHANGES)
_MOST_NUMBERS = 200_000_000  # held at once: 0.8 GB
_OF_KEYS = "load", "luck_of_key"  # what is held of each key; all else is held of each query


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
    streams: Streams = field(default_factory=Streams)  # residual streams of the model
    # by layer and head, one of each call
    parts: dict[tuple[int, int], list[dict[str, NDArray[Any]]]] = field(default_factory=dict)
    share: float = 1.0  # share of queries and keys that is held; halved, by chance, whenever they are too many
    held: int = 0  # numbers held
    most_keys: int = 0  # the most that a query has
    samples: SampleNumbers = field(default_factory=SampleNumbers)  # their numbers; each batch is to be begun
    # generators of luck, by layer and head; they follow the queries, whatever the batches
    dice: dict[tuple[int, int], tuple[np.random.Generator, ...]] = field(default_factory=dict)

    def add(self, call: AttentionCall) -> None:
        """Keep what a call says of its queries and keys, or of a share of them where all are too many."""
        places, ks = self.draws.places(call), self._output_ks
        if self.own_keys and call.selected is not None:
            call = replace(call, allowed=allowed_keys(call.part()), causal=False, first_query=0)
        stream = self.streams.of(call) if call.selected is None or self.own_keys else None
        rows = counted_rows(replace(call, selected=None), self.largest, places)
        changes = output_changes(rows, ks, stream)
        statistics, keys = rows.statistics, rows.keys
        self.most_keys = max(self.most_keys, int(statistics.keys.max()))
        numbers = torch.from_numpy(self.samples.of(len(call.q))).to(call.q.device)
        for head in range(call.q.shape[1]):
            own = rows.attending[:, head] & (statistics.keys[:, head] >= self.min_keys)
            part = {
                "entropy": statistics.entropy[:, head][own],
                "top": statistics.top[:, head][own].T,
                "range": (statistics.maximum - statistics.minimum)[:, head][own],
                "keys": statistics.keys[:, head][own],
                "log_sum_exp": statistics.log_sum_exp[:, head][own],
                "load": statistics.top_load[:, :, head][:, keys[:, head]].int(),
                **{name: values[:, head][own].movedim(0, -1) for name, values in changes.items()},
            }
            if places is not None:
                sample = numbers[:, None].expand_as(own)
                stratum = torch.arange(own.shape[1], device=own.device).expand_as(own) // PER_STRATUM
                part |= {"sample": sample[own], "stratum": stratum[own]}
            held: dict[str, NDArray[Any]] = {n: values.contiguous().cpu().numpy() for n, values in part.items()}
            place = call.layer, head
            dice = self.dice.setdefault(
                place, (_dice(self.draws.seed, *place, 0), _dice(self.draws.seed, *place, 1))
            )
            for name, like, rng in zip(("luck", "luck_of_key"), ("keys", "load"), dice, strict=True):
                held[name] = rng.random((held[like].shape[-1],), dtype=np.float32)
            held = self._thinned(held)
            self.held += sum(values.size for values in held.values())
            self.parts.setdefault(place, []).append(held)
        while self.held > _MOST_NUMBERS:
            self.share /= 2
            self.parts = {place: [self._thinned(part) for part in parts] for place, parts in self.parts.items()}
            self.held = sum(x.size for parts in self.parts.values() for part in parts for x in part.values())

    def _thinned(self, part: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the share of a part's queries and keys that is held."""
        if self.share == 1:
            return part
        queries, keys = (part[name] < self.share for name in ("luck", "luck_of_key"))
        return {name: values[..., keys if name in _OF_KEYS else queries] for name, values in part.items()}

    @property
    def _output_ks(self) -> tuple[int, ...]:
        return output_ks(self.largest, self.run)

    @property
    def _swept(self) -> tuple[int, ...]:
        """The k of the table: of a model's own keys none that all queries have."""
        ks = range(1, self.largest + 1) if self.every_k else self._output_ks
        most = max(1, self.most_keys - 1) if self.own_keys else self.largest
        return tuple(k for k in ks if k <= most)

    def _places(self) -> dict[tuple[int, int], dict[str, NDArray[Any]]]:
        return {
            place: {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}
            for place, parts in sorted(self.parts.items())
        }

    def estimates(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the table of estimates, pooled; only for drawn queries."""
        places = self._places()
        together = _joined(places.values())
        numbers = np.concatenate([np.full_like(p["sample"], at) for at, p in enumerate(places.values())])
        key = np.stack([numbers, together["sample"], together["stratum"]], 1)
        strata = np.unique(key, axis=0, return_inverse=True)[1].ravel()
        for k, quantity, values in _quantities(together, self._swept, self._output_ks):
            if quantity not in _ESTIMATED:
                continue
            for estimate in sampled_estimates(values, together["sample"], strata, self.draws.share, (5, 50, 95)):
                for target, (low, high) in zip(TARGETS, (estimate.these, estimate.such), strict=True):
                    row = {"k": k, "quantity": quantity, "statistic": estimate.statistic, "target": target}
                    yield {**row, "estimate": estimate.estimate, "low": low, "high": high}

    def table(self) -> pd.DataFrame:
        """Return the table without the column model: all quantities for each k, by head, then pooled."""
        places = self._places()
        together = _joined(places.values())
        labels = [*places, (ALL, ALL)]
        sizes, loads = ([p[name].shape[-1] for p in places.values()] for name in ("keys", "load"))
        columns: list[dict[str, NDArray[Any]]] = []
        names: list[tuple[int, str]] = []
        for k, quantity, values in _quantities(together, self._swept, self._output_ks):
            own = _by_place(values.astype(np.float64, copy=False), loads if quantity == "load" else sizes)
            columns.append(percentile_columns(own, pooled=True))
            names.append((k, quantity))
        order = np.arange(len(names) * len(labels)).reshape(len(names), -1).T.ravel()
        table = pd.DataFrame({name: np.concatenate([c[name] for c in columns])[order] for name in columns[0]})
        layers, heads = np.array(labels).repeat(len(names), 0).T
        ks, quantities = (np.tile(np.array(each), len(labels)) for each in zip(*names, strict=True))
        return table.assign(layer=layers, head=heads, k=ks, quantity=quantities)


def _dice(*seed: int) -> np.random.Generator:
    return np.random.default_rng([number + 1 for number in seed])  # layers may be unknown, -1


def _by_place(values: NDArray[np.float64], sizes: Sequence[int]) -> list[NDArray[np.float64]]:
    """Return concatenated values as tables with a row per layer and head: one table if all have equal lengths."""
    if len({*sizes}) == 1:
        return [values.reshape(len(sizes), -1)]
    return [part[None] for part in np.split(values, np.cumsum(sizes)[:-1])]


def _joined(places: Collection[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([p[name] for p in places], -1) for name in next(iter(places))}


def _quantities(
    place: dict[str, NDArray[Any]], ks: Sequence[int], output_ks: Sequence[int]
) -> Iterator[tuple[int, str, NDArray[Any]]]:
    """Yield every quantity of every k, over the queries (or keys) of one layer and head."""
    top, whole, keys = place["top"], place["range"].astype(np.float64), place["keys"]
    full = fixed_mask_stability(_tensor(whole), _tensor(keys)).log_value.numpy()
    yield 0, "dispersion", whole
    yield 0, "ln_sound", full
    several = np.where(keys > 1, np.log(np.maximum(keys, 2)), np.nan)
    yield 0, "evenness", place["entropy"] / several
    highest, others = top[0].astype(np.float64), np.where(keys > 1, place["others"], 0.0)
    mass, besides = np.zeros_like(whole), np.zeros_like(whole)
    for k in range(1, ks[-1] + 1):
        score = top[k - 1].astype(np.float64)
        mass += np.exp(score - place["log_sum_exp"])
        besides += np.exp(np.where(place["first_rank"] == k - 1, -np.inf, score) - others)
        if k not in ks:
            continue
        drops = keys > k  # elsewhere scores may be -inf
        lowest, following = (np.where(drops, each, 0.0) for each in (score, top[k].astype(np.float64)))
        dispersion = np.where(drops, highest - lowest, whole)
        separation = np.where(drops, lowest - following, np.inf)
        kept = np.minimum(keys, k)
        row = _tensor(dispersion), _tensor(separation), _tensor(kept)
        sound = heavy_hitter_stability(*row).log_value.numpy()
        yield k, "dispersion", dispersion
        spread = drops & (whole > 0)
        yield k, "ratio", np.divide(dispersion, whole, out=np.full_like(whole, np.nan), where=spread)
        yield k, "separation", separation
        yield k, "mass", np.where(drops, np.minimum(mass, 1.0), np.nan)
        yield k, "mass_without_first", np.where(drops, np.minimum(besides, 1.0), np.nan)
        for name in _CHANGES:
            if name in place and k in output_ks:
                yield k, name, np.where(drops, place[name][output_ks.index(k)], np.nan)
        yield k, "load", place["load"][k - 1]
        yield k, "ln_sound", sound
        yield k, "ln_paper", log_paper_heavy_hitter(*row).numpy()
        yield k, "sound_better", (sound < full).astype(np.float64)


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float64))
