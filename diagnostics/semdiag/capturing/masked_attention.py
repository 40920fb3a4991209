"""Attention over the keys that a rule keeps, without a mask of queries × keys: in strips, or by FlexAttention."""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.call_strips import (
    Strip,
    count_true,
    integers,
    is_true_on_cpu,
    key_heads,
    products,
    strip_part,
)
from semdiag.capturing.kept_keys import Choice, GroupedMask, heaviest
from semdiag.capturing.recording import Inputs, MaskedOutput, outside_all_modes, without_modes
from semdiag.mathematics import kernels
from semdiag.mathematics.score_strips import Scores, largest_scores, part_of
from semdiag_files import InputError


def why_dense(call: AttentionCall) -> str | None:
    """Return why a fused call's mask must be a tensor of queries × keys; None if it need not."""
    if call.dropout:
        return "it drops weights at random"
    if call.fully_masked is not None:
        return "finite constants hide all keys of a query"
    if call.softcap is not None or call.sinks is not None:
        return "it has terms that its function may ignore"
    return None


def as_computed(call: AttentionCall, inputs: Inputs) -> tuple[AttentionCall, Inputs]:
    """Return a call and its inputs in the dtype in which a fused function would compute under autocast."""
    kind = inputs[0].device.type
    if not torch.is_autocast_enabled(kind) or inputs[0].dtype == torch.float64:
        return call, inputs
    q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in inputs)
    return replace(call, q=q.detach(), k=k.detach(), v=v.detach()), (q, k, v)


_LARGE = 2**30  # bytes of a mask from which it is compared with the memory


def check_memory(call: AttentionCall) -> None:
    """Refuse a mask of queries × keys that does not fit, before anything is computed."""
    entries = math.prod(call.q.shape[:3]) * call.k.shape[2]
    needed = entries * (2 + call.q.element_size())  # chosen keys, allowed keys, and the mask that is added
    if needed > _LARGE and needed > (free := free_memory(call.q.device)):
        fits = int(call.q.shape[2] * math.sqrt(free / needed)) // 128 * 128
        raise InputError(
            f"A mask for {call.q.shape[2]:,} queries in {call.module or 'the model itself'} takes "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free: about {fits:,} tokens would fit."
        )


def free_memory(device: torch.device) -> float:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    import psutil  # type: ignore[import-untyped]  # no capture needs it

    free = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no cgroup, or no limit
        limit, used = (float(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def out_of_memory(error: Exception) -> str:
    """Return torch's first sentence about memory that ran out."""
    return str(error).split(". ")[0].strip() + ". Take shorter inputs, fewer at a time, or a smaller dtype."


def attended(choice: Choice, inputs: Inputs) -> MaskedOutput:
    """Return what queries gather from the keys that a choice keeps: by FlexAttention on a GPU, else in strips."""
    while fits_flex(choice, inputs):
        try:
            return flexible(choice, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler may raise anything
            FAILED.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return in_strips(choice, inputs)


def in_strips(choice: Choice, inputs: Inputs) -> MaskedOutput:
    """Return the attention strip by strip: only a strip's scores are held, and the backward pass repeats them."""
    q = inputs[0]
    number = torch.zeros(q.shape[:3], dtype=torch.int32, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        return MaskedOutput(_Strips.apply(*inputs, choice, number), number)


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, choice: Choice, number: Tensor) -> Tensor:
        """Sum the values of kept keys; write the numbers of kept keys."""
        mixed = q.new_empty(len(q), q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        with outside_all_modes(q.device.type):
            for strip in choice.strips(banded=True):
                strip, weights, kept = _weights(choice, strip)
                b = strip.samples
                h = strip.heads
                r = strip.queries
                number[b, h, r] = kept
                mixed[b, h, r] = products(weights, key_heads(v, strip, choice.call).to(weights.dtype))
        ctx.choice = choice
        ctx.save_for_backward(q, k, v, mixed)
        return mixed

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        choice: Choice = ctx.choice
        q, k, v, mixed = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated again
            inputs = [x for x in (q, k, v) if x.requires_grad]
            found = iter(torch.autograd.grad(_written_out(choice, (q, k, v)), inputs, given, create_graph=True))
            return *(next(found) if x.requires_grad else None for x in (q, k, v)), None, None
        with outside_all_modes(q.device.type):
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
            for strip in choice.strips(banded=True):
                strip, weights, _ = _weights(choice, strip)
                b = strip.samples
                h = strip.heads
                r = strip.queries
                out = given[b, h, r].to(dtype)
                _add_keys(dv, strip, choice.call, weights, out)
                slope = products(out, key_heads(v, strip, choice.call).to(dtype).mT)
                slope -= (out * mixed[b, h, r].to(dtype)).sum(-1, keepdim=True)
                slope *= weights
                dq[b, h, r] = products(slope, key_heads(k, strip, choice.call).to(dtype), choice.call.scale)
                _add_keys(dk, strip, choice.call, slope, q[b, h, r].to(dtype) * choice.call.scale)
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _written_out(choice: Choice, inputs: Inputs) -> Tensor:
    """Return the attention by operations that can be differentiated several times; it holds all weights."""
    q, k, v = inputs
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    mixed = q.new_zeros(*q.shape[:3], v.shape[3])
    for strip in choice.strips(banded=True):
        with outside_all_modes(q.device.type):
            strip, weights, _ = _weights(choice, strip)
            bias = strip_part(choice.call.bias, strip)
        b, h, r = strip.samples, strip.heads, strip.queries
        scores = products(q[b, h, r].to(dtype), key_heads(k, strip, choice.call).to(dtype).mT, choice.call.scale)
        scores = scores if bias is None else scores + bias
        kept = weights > 0  # one that underflows has no slope either
        hidden = ~kept & kept.any(-1, keepdim=True)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(~kept, 0)
        mixed[b, h, r] = products(weights, key_heads(v, strip, choice.call).to(dtype)).to(q.dtype)
    return mixed


def _weights(choice: Choice, strip: Strip) -> tuple[Strip, Tensor, Tensor]:
    """Return a strip's weights, zero outside of the kept keys, and the numbers of these; the strip may widen."""
    scores = choice.scores(strip)
    allowed = choice.allowed(strip)
    kept, number = choice.kept(strip, scores, allowed)
    # A query whose own key is hidden may have no near key: then it keeps all.
    some = strip.banded and choice.call.allowed is None
    if strip.banded and not some and not bool(number.all()):
        return _weights(choice, replace(strip, keys=choice.seen(strip.queries), banded=False))
    some = some or is_true_on_cpu(number.all())
    weights = scores.masked_fill_(~kept, -torch.inf).softmax(-1)
    return strip, weights if some else weights.masked_fill_((number == 0)[..., None], 0), number


def _add_keys(total: Tensor, strip: Strip, call: AttentionCall, weights: Tensor, rows: Tensor) -> None:
    """Add weightsᵀ @ rows to the keys of a strip; heads that share a key add up."""
    shared = call.q.shape[1] // call.k.shape[1]
    heads = slice(strip.heads.start // shared, -(-strip.heads.stop // shared))
    own = total[strip.samples, heads]
    shared_rows = rows.shape[1] * rows.shape[2] // own.shape[1]
    left, right = (x.reshape(len(own) * own.shape[1], shared_rows, x.shape[3]) for x in (weights, rows))
    part = torch.bmm(left.mT, right).view(*own.shape[:2], left.shape[2], own.shape[3])
    if isinstance(strip.keys, slice):
        own[:, :, strip.keys] += part
    else:
        own.index_add_(2, strip.keys, part)


_LEAST = 512  # queries from which a call on a GPU takes FlexAttention; shorter ones do not pay for its start
_BLOCK = 128  # queries, and keys, of FlexAttention's blocks
_AT_ONCE = 2**24  # entries of a mask looked at together
FAILED: list[str] = []  # why FlexAttention could not be compiled for all lengths, and for one length


class Thresholds(NamedTuple):
    """Keep a score of at least ``high``, or of at least ``low`` at most at ``place``, (B, H, Lq)."""

    high: Tensor
    low: Tensor
    place: Tensor
    close: Tensor  # whether the last kept and the first dropped score are within rounding of each other
    number: Tensor | None = None  # numbers of kept keys, where they follow from the scores


def fits_flex(choice: Choice, inputs: Inputs) -> bool:
    """Return whether a call with its rule is FlexAttention's."""
    q = inputs[0]
    rule = choice.rule
    able = q.is_cuda and q.dtype != torch.float64 and q.shape[2] >= _LEAST and len(FAILED) < 2
    small = math.prod(q.shape[:3]) * choice.call.k.shape[2] <= _LARGE * getattr(rule, "block", 1)
    return able and (choice.by_threshold or (choice.by_table and small))


def flexible(choice: Choice, inputs: Inputs) -> MaskedOutput:
    """Return the attention by FlexAttention."""
    q, k, v = inputs
    with outside_all_modes(q.device.type):
        table = choice.table() if choice.by_table else None
        number, bare, blocks = _layout(choice, table)
        choice.bare = None if bare is None else (bare & (number > 0)).expand(q.shape[:3])
        rows = None if choice.by_position or table is not None else row_thresholds(choice)
        if rows is not None and bare is not None and min(choice.counts) == 0:
            place = rows.place.masked_fill(bare, choice.call.k.shape[2])
            rows = rows._replace(low=rows.low.masked_fill(bare, -torch.inf), place=place)
        modified = _score_mod(choice, rows)
    with (
        without_modes(),
        torch.autocast(q.device.type, enabled=False),
        torch.compiler.set_stance("default"),
        torch._dynamo.config.patch(recompile_limit=64),
    ):
        several = q.shape[1] != k.shape[1]
        output = _flex(not FAILED)(q, k, v, modified, blocks, choice.call.scale, several)
    number = number if rows is None or rows.number is None else rows.number
    return MaskedOutput(output, number, None if rows is None else rows.close.sum())


@cache
def _flex(dynamic: bool) -> Callable[..., Tensor]:
    """Return FlexAttention, which is compiled when it runs first: for all lengths, or for each length anew."""
    print("semdiag compiles FlexAttention for masks: once, up to a minute", file=sys.stderr, flush=True)
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic, fullgraph=True)


def row_thresholds(choice: Choice) -> Thresholds:
    """Return the scores halfway between each row's k-th and next one; positions tell equal ones apart."""
    call = choice.call
    most = max(choice.counts)
    p = getattr(choice.rule, "p", None)
    number = None
    if p is None and call.q.is_cuda and kernels.refusal(call.q, None, most) is None:
        free = call.allowed
        if choice.near is not None or choice.sinks is not None:
            heads, queries, keys = (slice(0, n) for n in (*call.q.shape[1:3], call.k.shape[2]))
            fixed = choice.fixed(Strip(slice(None), heads, queries, keys))
            assert fixed is not None
            free = ~fixed if free is None else free & ~fixed
        scores = Scores(call.q, call.k, call.scale, free, call.bias, None, call.causal, call.first_query)
        found = kernels.kernel_rows(scores, most, None, False)[0]
        top = found["top"]
        order = found["order"]
    else:
        top = torch.empty(*call.q.shape[:3], most + 1, device=call.q.device)
        order = torch.empty(*call.q.shape[:3], most, dtype=torch.int32, device=call.q.device)
        number = None if p is None else torch.empty_like(order[..., 0])
        for strip in choice.strips():
            at = strip.samples, strip.heads, strip.queries
            values = choice.scores(strip).masked_fill_(~choice.free(strip), -torch.inf)
            if p is None or number is None:
                top[at], order[at] = largest_scores(values, most)
                continue
            values, places = F.pad(values, (0, 1), value=-torch.inf).sort(dim=-1, descending=True, stable=True)
            count = heaviest(values, p).sum(-1, keepdim=True)
            at_last = (count - 1).clamp(min=0)
            top[at] = values.gather(-1, torch.cat([at_last, count], -1))
            order[at] = places.gather(-1, at_last).int()
            number[at] = count[..., 0].int()
    k = integers(*choice.counts, device=top.device)[:, None, None].expand(*top.shape[:3], 1)
    last, after = (top.gather(-1, rank)[..., 0] for rank in ((k - 1).clamp(min=0), k))
    place = order.gather(-1, (k - 1).clamp(min=0))[..., 0]
    near = _error(call) + 2.0**-22 * last.abs().nan_to_num(0, 0, 0)
    middle = after + (last - after) / 2
    middle = torch.where(middle > after, middle, last).masked_fill(after == -torch.inf, -torch.inf)
    tied = (last == after) & (after > -torch.inf)
    none = k[..., 0] == 0
    high = torch.where(tied, last + 2 * near, middle).masked_fill(none, torch.inf)
    low = torch.where(tied, last - 2 * near, middle).masked_fill(none, torch.inf)
    return Thresholds(high, low, place, (last - after <= 4 * near) & (after > -torch.inf) & ~none, number)


def _error(call: AttentionCall) -> Tensor:
    """Return a bound of the error of a row's scores, (B, H, Lq): γ |scale| ‖q‖ max ‖k‖."""
    shared = call.q.shape[1] // call.k.shape[1]
    longest = call.k.norm(dim=-1, dtype=torch.float32).amax(-1).repeat_interleave(shared, 1)[..., None]
    # Sums on tensor cores; float32 in three products of TF32, or in one where torch is told so.
    terms = (6 if call.q.dtype == torch.float32 else 2) * call.q.shape[3]
    coarse = call.q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    gamma = 2.0**-23 * terms + (2.0**-9 if coarse else 3 * 2.0**-22)
    error: Tensor = gamma * abs(call.scale) * call.q.norm(dim=-1, dtype=torch.float32) * longest
    return error


# Numbers of kept keys, int32, broadcastable to (B, H, Lq); queries that keep all keys because none is kept by
# position, None: there is none; and a BlockMask.
_Layout = tuple[Tensor, Tensor | None, Any]
_LAYOUTS: dict[tuple[Any, ...], _Layout] = {}  # the last ones of calls without a mask of their own


def _layout(choice: Choice, table: GroupedMask | None) -> _Layout:
    """Return the numbers of kept keys, and FlexAttention's mask: what the call allows, or positions keep of it."""
    call = choice.call
    rule = choice.rule
    sinks = getattr(rule, "sinks", 0)
    key = (*choice.counts, choice.near, sinks, call.q.shape, call.k.shape[2], call.first_query, call.causal)
    key = (*key, call.q.device)
    cached = call.allowed is None and table is None
    if cached and key in _LAYOUTS:
        return _LAYOUTS[key]
    length = call.k.shape[2]
    k = integers(*choice.counts, device=call.q.device)[:, None].int()
    heads = 1 if table is None else table.kept.shape[1]
    step = max(1, _AT_ONCE // (length * len(call.q) * heads) // _BLOCK) * _BLOCK
    numbers = list[Tensor]()
    bares = list[Tensor]()
    some = list[Tensor]()
    every = list[Tensor]()
    for start in range(0, call.q.shape[2], step):
        rows = slice(start, min(start + step, call.q.shape[2]))
        strip = Strip(slice(None), slice(0, call.q.shape[1]), rows, slice(0, length))
        seen = choice.allowed(strip)
        fixed = choice.fixed(strip)
        keys = count_true(seen)
        fixed = None if fixed is None else fixed & seen
        if table is not None:
            kept = table.part(slice(None), rows, slice(None)) & seen
            fixed = kept if fixed is None else fixed | kept
        chosen = choice.by_position or table is not None
        number = (
            k.minimum(keys)
            if fixed is None
            else count_true(fixed) + k.minimum(keys - count_true(fixed)) * (not chosen)
        )
        without = number == 0  # a query without any key keeps all
        if chosen and fixed is not None:
            seen = fixed | (seen & without[..., None])
        numbers.append(torch.where(without, keys, number))
        bares.append(without)
        inside = F.pad(seen, (0, -length % _BLOCK, 0, -seen.shape[2] % _BLOCK)).view(torch.uint8)
        inside = inside.view(*inside.shape[:2], -1, _BLOCK, inside.shape[3] // _BLOCK, _BLOCK)
        inside = inside.sum((3, 5), dtype=torch.int32)
        some.append((inside > 0) & (inside < _BLOCK**2))
        every.append(inside == _BLOCK**2)
    bare = None if cached else torch.cat(bares, 2)
    from torch.nn.attention.flex_attention import BlockMask

    listed = (*_listed(torch.cat(some, 2)), *_listed(torch.cat(every, 2)))
    visible = _mask_mod(choice, bare, table)
    sizes: dict[str, Any] = {"BLOCK_SIZE": _BLOCK, "seq_lengths": (call.q.shape[2], length)}
    blocks = BlockMask.from_kv_blocks(*listed, mask_mod=visible, **sizes)
    found = torch.cat(numbers, 2), bare, blocks
    if cached:
        while len(_LAYOUTS) >= 8:
            del _LAYOUTS[next(iter(_LAYOUTS))]
        _LAYOUTS[key] = found
    return found


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of keys for each block of queries, and their positions, those first."""
    order = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def _at(values: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if values is None else part_of(values, slice(None), slice(None)).expand(shape)  # type: ignore[union-attr]


def _mask_mod(choice: Choice, bare: Tensor | None, table: GroupedMask | None) -> Callable[..., Tensor]:
    call = choice.call
    size = (*call.q.shape[:3], call.k.shape[2])
    causal = call.causal
    allowed = _at(call.allowed, size)
    near = _near(choice)
    positions = near if choice.by_position or table is not None else None
    kept, rows, columns = (None,) * 3 if table is None else table
    if kept is not None and rows is not None and columns is not None:
        kept = kept.expand(*size[:2], -1, -1)
        rows, columns = (x.expand(size[0], -1).contiguous() for x in (rows, columns))
    first = integers(call.first_query, device=call.q.device)
    everything = None if bare is None else bare.expand(size[:3])

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = k >= 0
        if kept is not None and rows is not None and columns is not None:
            seen = kept[b, h, rows[b, q], columns[b, k]]
            seen = seen if positions is None else seen | positions(b, q, k)
        elif positions is not None:
            seen = positions(b, q, k)
        if everything is not None and (kept is not None or positions is not None):
            seen = seen | everything[b, h, q]
        if causal:
            seen = seen & (k <= q + first[0])
        return seen if allowed is None else seen & allowed[b, h, q, k]

    return visible


def _score_mod(choice: Choice, rows: Thresholds | None) -> Callable[..., Tensor] | None:
    call = choice.call
    bias = _at(call.bias, (*call.q.shape[:3], call.k.shape[2]))
    near = _near(choice)
    if rows is None and bias is None:
        return None
    high, low, place = (None,) * 3 if rows is None else rows[:3]

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if bias is not None:
            score = score + bias[b, h, q, k]
        if high is None or low is None or place is None:
            return score
        kept = (score >= high[b, h, q]) | ((score >= low[b, h, q]) & (k <= place[b, h, q]))
        if near is not None:
            kept = kept | near(b, q, k)
        return torch.where(kept, score, -torch.inf)

    return modified


def _near(choice: Choice) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return whether keys are kept for their position, as a function of sample, query and key; None: none is."""
    call = choice.call
    near = choice.near
    sinks = choice.sinks
    if near is None and sinks is None:
        return None
    numbers = integers(call.first_query, *(near or (0, 0)), device=call.q.device)
    sinks = None if sinks is None else sinks.expand(len(call.q), -1).contiguous()
    window = near is not None

    def kept(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        back = q + numbers[0] - k
        inside = (back <= numbers[1]) & (back >= -numbers[2])
        if sinks is None:
            return inside
        return inside | sinks[b, k] if window else sinks[b, k]

    return kept
