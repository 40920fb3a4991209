"""What a run takes before it starts, the batch that fits in memory, and the length that would."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.masked_attention import free_memory
from semdiag.measuring.calls.running import NoRoomError, in_evaluation, running
from semdiag.measuring.plan import LargestPass, Plan
from semdiag.measuring.words import counted, duration

_LONG = 1024  # tokens of all samples from which a run is worth an estimate, if one has at least _CUT
_SHORT = 32  # tokens of a forward pass that warms up
_CUT = 256  # tokens of the forward pass by which the estimate is made
# Bytes of a row for each of its k largest scores, and of each of its changes: benchmarks/README.md#cost-model.
_ROWS = 12.6
_KEYS = 8.2
_CHANGES = 72.0  # 18 truncated outputs
_STREAMS = 24  # numbers of a token's width that a layer holds at a time
_ROW = 60  # bytes of a row of the table of queries
_TABLE = 20_000_000  # rows that the table holds at most
_SAMPLE = 2**29  # bytes that the rows of a k-sweep take at most
_NUMBERS = 45  # numbers of a row of a k-sweep beside its largest scores, four bytes each
_COPIES = 2  # copies of these rows while they are joined
_OUTPUTS = 5  # copies of the logits that are held while a run with a mask is compared; measured
_PROBED = 256  # queries of a sample and head of which a probe in float64 holds the scores
_PROBE = 15 * 8  # bytes of a score there, and of what is made of it
_CAPTURED = 2.0  # forward passes that take as long as a captured one on a CPU
_SPARE = 0.9  # share of the free memory that is used
T = TypeVar("T")


@dataclass(frozen=True)
class Demand:
    """What a model of known size takes on texts of a length."""

    layers: int
    heads: int
    width: int  # numbers of a token
    vocabulary: int  # columns of the output; 0 if it has none
    itemsize: int
    by_hand: bool  # whether it holds scores of all pairs of tokens
    parameters: int
    seconds: float  # duration of a forward pass of _CUT tokens

    def bytes(self, samples: int, length: int, k: int, masks: int, passes: Sequence[LargestPass] = ()) -> float:
        """Return the memory beyond the model's own, with the largest passes of probes."""
        rows = samples * self.heads * length
        scores = rows * length * (3 * self.itemsize if self.by_hand or masks else 0) / (1 if self.by_hand else 8)
        outputs = samples * length * self.vocabulary * self.itemsize * (_OUTPUTS if masks else 1)
        swept = min(self.layers * rows * (k + _NUMBERS) * 4 * _COPIES, _SAMPLE)
        tables = min(self.layers * rows, _TABLE) * _ROW + swept
        call = rows * (k * (_ROWS + _KEYS) + _CHANGES)
        swept_pass = call + scores + outputs + samples * length * self.width * _STREAMS * self.itemsize
        return max(swept_pass, *(self._pass_bytes(each, length) for each in passes), 0.0) + tables

    def _pass_bytes(self, largest: LargestPass, length: int) -> float:
        """Return what a pass of a probe takes, with the copy of a model that runs in float64."""
        itemsize = 8 if largest.double else self.itemsize
        copy = 8 * self.parameters if largest.double and self.itemsize < 8 else 0
        tokens = largest.samples * length
        probed = self.heads * min(length, _PROBED) * length * largest.samples * _PROBE if largest.double else 0
        scores = self.heads * tokens * length * 3 * itemsize if self.by_hand else 0
        return copy + tokens * (self.vocabulary + self.width * _STREAMS) * itemsize + probed + scores

    def time(self, samples: int, length: int) -> float:
        """Return the seconds of one captured pass."""
        products = 2 * self.parameters
        pairs = 2 * self.layers * self.width  # per token; per pair of tokens
        growth = (products + pairs * length) / (products + pairs * _CUT)
        return self.seconds * samples * length / _CUT * growth * _CAPTURED


def demand(
    loaded: LoadedModel, batches: Sequence[Batch], device: torch.device | str | None, dtype: torch.dtype | None
) -> Demand | None:
    """Return what a model takes, from its first tokens; None for short inputs, and others than token ids."""
    ids = all(isinstance(b, Tensor | Mapping) and batching.only_token_ids(b) for b in batches)
    if not (loaded.external and ids and batches) or max(map(batching.longest, batches)) < _CUT:
        return None
    if sum(batching.samples_of(batch) * batching.longest(batch) for batch in batches) < _LONG:
        return None
    first = max(batches, key=batching.longest)
    calls = list[tuple[int, int, int]]()

    def look(call: AttentionCall) -> None:
        calls.append((call.layer, call.q.shape[1], call.q.shape[3]))

    with running(loaded, look, device, dtype) as run:
        run(shortened(first, _SHORT))
    seconds, vocabulary, itemsize = _timed(loaded, shortened(first, _CUT), device, dtype)
    if not calls:
        return None
    _, heads, head_width = calls[0]
    implementation = getattr(getattr(loaded.module, "config", None), "_attn_implementation", "")
    return Demand(
        layers=len({layer for layer, *_ in calls}),
        heads=heads,
        width=heads * head_width,
        vocabulary=vocabulary,
        itemsize=itemsize,
        by_hand=implementation == "eager",
        parameters=sum(p.numel() for p in loaded.module.parameters()),
        seconds=seconds,
    )


def _timed(
    loaded: LoadedModel, batch: Batch, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[float, int, int]:
    """Return the seconds of a forward pass, the columns of its output (0: none), and the bytes of a number."""
    with in_evaluation(loaded, device, dtype) as (module, place, kind):
        start = time.perf_counter()
        output = batching.call(module, batching.moved(batch, place, kind))
        logits: Any = output.get("logits") if isinstance(output, Mapping) else output
        has_logits = isinstance(logits, Tensor) and logits.ndim == 3
        float(logits.sum() if has_logits else 0)  # waits for the device
        seconds = time.perf_counter() - start
    return seconds, logits.shape[-1] if has_logits else 0, torch.finfo(kind).bits // 8


def shortened(batch: Batch, length: int) -> Batch:
    """Return the first sample of token ids, cut to a length."""
    if isinstance(batch, Tensor):
        return batch[:1, :length]
    return {n: x[:1, :length] if isinstance(x, Tensor) and x.ndim > 1 else x for n, x in dict(batch).items()}


def fitting_batch(
    demand_of_model: Demand,
    path: str,
    batches: Sequence[Batch],
    device: torch.device,
    k: int,
    masks: int,
    plans: Sequence[Plan] = (),
) -> tuple[int, str]:
    """Return the largest number of samples at a time that fits, and what statistics take in words.

    Runs with masks count in the memory; how long they take is measured before they begin.
    """

    def needed(size: int, length: int) -> float:
        passes = [each for plan in plans if (each := plan.largest_pass(size, length)) is not None]
        return demand_of_model.bytes(size, length, k, masks, passes)

    length = max(map(batching.longest, batches))
    free = _SPARE * free_memory(device)
    samples = sum(map(batching.samples_of, batches))
    size = largest_batch = max(map(batching.samples_of, batches))
    while size > 1 and needed(size, length) > free:
        size //= 2
    if needed(size, length) > free:
        fits = length
        while fits > 1 and needed(1, fits) > free:
            fits = fits * 9 // 10
        raise NoRoomError(
            f"{path}: one sample of {length:,} tokens takes {_amount(needed(1, length))}, and {_amount(free)} are "
            f"free. About {fits:,} tokens fit: --max-length {fits}, or shorter inputs."
        )
    tokens = sum(batching.samples_of(batch) * batching.longest(batch) for batch in batches)
    seconds = demand_of_model.time(1, length) * tokens / length
    text = f"{counted(samples, 'sample')} of up to {length:,} tokens take about {duration(seconds)}"
    uncounted = "runs with masks and other probes" if masks else "other probes"
    text += f", {uncounted} not counted, and {_amount(needed(size, length))} beside the model"
    if size < largest_batch:
        text += f", {size} of {largest_batch} samples at a time"
    return size, text


def _amount(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def halving(
    run: Callable[[list[Batch], int], T],
    batches: Sequence[Batch],
    size: int,
    remark: Callable[[str], Any] = lambda text: None,
) -> T:
    """Run with batches of at most so many samples; halve them as often as they do not fit in memory."""
    cut = list(batches)
    while True:
        try:
            return run(cut, size)
        except NoRoomError:
            largest = max(map(batching.samples_of, cut))
            size = largest // 2
            uncuttable = any(isinstance(b, tuple | list) and batching.samples_of(b) > size for b in cut)
            if not size or uncuttable:
                raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        cut = [part for batch in cut for part in batching.each(batch, size)] if size < largest else cut
        remark(f"{largest} samples at a time do not fit in memory: {size} are run")
