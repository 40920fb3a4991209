"""Row statistics of an attention call, which of its queries and keys count, and how both reach the host."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Audit, Remark
from semdiag.mathematics import kernels
from semdiag.mathematics.row_statistics import RowStatistics, row_statistics
from semdiag.mathematics.score_strips import part_of, rows_of

_STRIP = 2**24  # entries of a mask processed at a time


@dataclass(frozen=True, eq=False)
class CountedRows:
    """Row statistics of an attention call, and which of its queries and keys count."""

    call: AttentionCall
    statistics: RowStatistics  # statistics of every row that is looked at, padded queries included
    queries: Tensor  # (B, H, R) bool, false for padded queries
    attending: Tensor  # (B, H, R) bool, queries that count and keep a key, so that they have a softmax
    places: Tensor | None = None  # (B, H, R) int64, positions of the queries, -1 for none
    real_keys: Tensor | None = None  # :attr:`keys`, if the call is a part that lacks queries of the whole

    @cached_property
    def keys(self) -> Tensor:
        """(B, H, Lk) bool: keys to which a real query may attend, drawn or not; the others are padding."""
        if self.real_keys is not None:
            return self.real_keys
        if self.call.selected is None and self.places is None:
            return self.statistics.load > 0
        return attended_keys(self.call)

    @cached_property
    def _first(self) -> tuple[Tensor, Tensor, Tensor]:
        """For the first real key, each (B, H, R): its score, whether a row may attend to it, whether it does."""
        call = self.call
        exact = self.statistics.kept_log_sum_exp.dtype
        first = self.keys.to(torch.uint8).argmax(-1)[..., None]  # (B, H, 1)
        sample, head = (torch.arange(size, device=first.device) for size in first.shape[:2])
        key = call.k[sample[:, None], head // (len(head) // call.k.shape[1]), first[..., 0]]
        z = torch.linalg.vecdot(call.q.to(exact), (key.to(exact) * call.scale)[:, :, None])
        if call.softcap is not None:
            z = call.softcap * torch.tanh(z / call.softcap)
        bias, allowed = (self._at(values, first) for values in (call.bias, call.allowed))
        z = z if bias is None else z + bias
        visible = torch.ones_like(z, dtype=torch.bool) if allowed is None else allowed.expand_as(z)
        if call.causal:
            visible = visible & (first <= call.first_query + torch.arange(z.shape[2], device=z.device))
        attended = visible if call.selected is None else visible & (call.selected == first[..., None]).any(-1)
        if self.places is not None:
            z, visible, attended = (
                rows_of(values[..., None], self.places)[..., 0] for values in (z, visible, attended)
            )
        return z, visible, attended

    def first_weight(self) -> Tensor:
        """Return the attention weight on the first real key, (B, H, R); NaN for a row without keys."""
        z, _, attended = self._first
        weight = torch.where(attended, (z - self.statistics.kept_log_sum_exp).exp().clamp(max=1), 0.0)
        return weight.masked_fill(self.statistics.kept == 0, torch.nan)

    def first_kept(self, k: int | None = None) -> Tensor:
        """Return whether a row attends to the first real key, (B, H, R) bool."""
        z, visible, attended = self._first
        if k is None:
            return attended
        top = self.statistics.top  # may be rounded differently
        return visible & (z >= (top[..., k - 1] + top[..., k]) / 2)

    def query_norms(self) -> Tensor:
        """Return the norm of every query, (B, H, R), float32; NaN where only scores are known."""
        norms: Tensor = self.call.q.float().norm(dim=-1)
        if self.places is not None:
            norms = rows_of(norms[..., None], self.places)[..., 0]
        return norms if self.call.factored else norms * torch.nan

    def key_norms(self) -> Tensor:
        """Return the norm of every key, (B, H, Lk), float32; NaN where only scores are known."""
        norms: Tensor = self.call.k.float().norm(dim=-1)
        norms = norms if self.call.factored else norms * torch.nan
        return norms.repeat_interleave(self.call.q.shape[1] // norms.shape[1], 1)

    def output_products(self) -> Tensor:
        """Return products of the outputs (H, n, n) whose eigenvalues are the squares of their singular values.

        Outputs of rows that do not attend count as 0. All queries of the call must be looked at.
        """
        outputs = self.call.mixed.double().transpose(0, 1).flatten(1, 2)  # (H, B · R, Dv)
        # A row without keys may be NaN.
        outputs = outputs.where(self.attending.transpose(0, 1).flatten(1)[..., None], 0.0)
        tall = outputs.shape[1] > outputs.shape[2]
        return outputs.transpose(1, 2) @ outputs if tall else outputs @ outputs.transpose(1, 2)

    def _at(self, values: Tensor | None, key: Tensor) -> Tensor | None:
        """Return the values at one key per head, (B, H, 1), of a tensor broadcastable to (B, H, Lq, Lk)."""
        values = part_of(values, slice(None), slice(None))
        if values is None or values.shape[3] == 1:
            return None if values is None else values[..., 0]
        shape = *key.shape[:2], *values.shape[2:]
        return values.expand(shape).gather(3, key[..., None].expand(*shape[:3], 1))[..., 0]


def attended_keys(call: AttentionCall, samples: Tensor | slice = slice(None)) -> Tensor:
    """Return the keys to which some real query of a call may attend, (B, H, Lk) bool; the others are padding."""
    is_real = call.counted[samples, :1]
    first_query = call.first_query
    allowed = part_of(call.allowed, samples, slice(None))
    shape = (len(is_real), call.q.shape[1], call.k.shape[2])
    device = call.k.device
    rows, keys = (torch.arange(length, device=device) for length in (is_real.shape[2], shape[2]))
    if allowed is None or allowed.shape[2] == 1:  # the last real query sees all keys that others see
        last = torch.where(is_real, rows, -1 - first_query).amax(-1, keepdim=True)
        reached = keys <= first_query + last if call.causal else last >= 0
        return (reached if allowed is None else reached & allowed[:, :, 0]).expand(shape)
    attended = torch.zeros(shape, dtype=torch.bool, device=device)
    strip = max(1, _STRIP // max(1, math.prod(shape)))
    for start in range(0, len(rows), strip):
        part = slice(start, start + strip)
        reached = is_real[:, :, part, None] & allowed[:, :, part]
        if call.causal:
            reached = reached & (keys <= first_query + rows[part, None])
        attended = attended | reached.any(2)
    return attended


def remark_path(call: AttentionCall, audit: Audit) -> None:
    """Remark why a call on a GPU is reduced without the kernels that are made for it."""
    if call.q.device.type == "cuda" and (problem := kernels.refusal(call.q, call.selected)) is not None:
        text = f"row statistics take the path without kernels, which do not know {problem}"
        audit.remarks[Remark(call.module, text, "plain-path")] += 1


def counted_rows(
    call: AttentionCall, top: int = 0, places: Tensor | None = None, received: bool = False
) -> CountedRows:
    """Reduce an attention call to the statistics of its rows."""
    masks = call.allowed, call.selected, call.queries
    further = {name: getattr(call, name) for name in ("bias", "softcap", "sinks", "causal", "first_query")}
    statistics = row_statistics(
        call.q, call.k, call.scale, *masks, top, places=places, received=received, **further
    )
    counted = call.counted if places is None else (places >= 0) & call.counted.gather(2, places.clamp(min=0))
    return CountedRows(call, statistics, counted, counted & (statistics.kept > 0), places)


Tensors = dict[str, Tensor]


class Arrivals:
    """Tensors on their way from devices to the host, so that no forward pass waits for them."""

    def __init__(self, polls: bool = True) -> None:
        self._polls = polls  # whether to use, when something is sent, what has arrived from a GPU
        self._waiting: deque[tuple[list[torch.cuda.Event], Tensors, Callable[[Tensors], None]]] = deque()

    def send(self, tensors: Tensors, use: Callable[[Tensors], None]) -> None:
        """Use tensors on the host: at once, or in :meth:`settle` where they come from a GPU."""
        copies: dict[int, Tensor] = {}  # by id: some tensors are given twice
        for x in tensors.values():
            if id(x) not in copies:  # torch puts what it copies without blocking into pinned memory
                copies[id(x)] = x.to("cpu", non_blocking=x.is_cuda)
        events = []
        for device in {x.device for x in tensors.values() if x.is_cuda}:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            events[-1].record(torch.cuda.current_stream(device))
        self._waiting.append((events, {name: copies[id(x)] for name, x in tensors.items()}, use))
        if self._polls or not events:
            self.settle(wait=False)

    def __len__(self) -> int:
        return len(self._waiting)

    def settle(self, wait: bool = True) -> None:
        """Use the tensors that have arrived, in the order in which they were sent; ``wait``: and all others."""
        while self._waiting:
            events, tensors, use = self._waiting[0]
            if not (wait or all(event.query() for event in events)):  # type: ignore[no-untyped-call]
                return
            for event in events:
                event.synchronize()
            self._waiting.popleft()
            use(tensors)
