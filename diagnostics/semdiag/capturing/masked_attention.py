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
from semdiag.capturing.choices import heaviest
from semdiag.capturing.kept_keys import Choice
from semdiag.capturing.patches import without_modes
from semdiag.capturing.recording import Inputs, MaskedOutput, outside_all_modes
from semdiag.capturing.rules import TopP
from semdiag.capturing.tiles import GroupedMask
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
                strip, weights, number[strip.rows] = _weights(choice, strip)
                mixed[strip.rows] = products(weights, key_heads(v, strip, choice.call).to(weights.dtype))
        ctx.choice = choice
        ctx.save_for_backward(q, k, v, mixed)
        return mixed

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        choice: Choice = ctx.choice
        q, k, v, mixed = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated again
            inputs = [x for x in (q, k, v) if x.requires_grad]
            output = _written_out(choice, (q, k, v))
            gradients = iter(torch.autograd.grad(output, inputs, slopes, create_graph=True))
            return *(next(gradients) if x.requires_grad else None for x in (q, k, v)), None, None
        with outside_all_modes(q.device.type):
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
            for strip in choice.strips(banded=True):
                strip, weights, _ = _weights(choice, strip)
                out = slopes[strip.rows].to(dtype)
                _add_keys(dv, strip, choice.call, weights, out)
                slope = products(out, key_heads(v, strip, choice.call).to(dtype).mT)
                slope -= (out * mixed[strip.rows].to(dtype)).sum(-1, keepdim=True)
                slope *= weights
                dq[strip.rows] = products(slope, key_heads(k, strip, choice.call).to(dtype), choice.call.scale)
                _add_keys(dk, strip, choice.call, slope, q[strip.rows].to(dtype) * choice.call.scale)
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
        scores = products(
            q[strip.rows].to(dtype), key_heads(k, strip, choice.call).to(dtype).mT, choice.call.scale
        )
        if bias is not None:
            scores = scores + bias
        positive = weights > 0  # one that underflows has no slope either
        hidden = ~positive & positive.any(-1, keepdim=True)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(~positive, 0)
        mixed[strip.rows] = products(weights, key_heads(v, strip, choice.call).to(dtype)).to(q.dtype)
    return mixed


def _weights(choice: Choice, strip: Strip) -> tuple[Strip, Tensor, Tensor]:
    """Return a strip's weights, zero outside of the kept keys, and the numbers of these; the strip may widen."""
    scores = choice.scores(strip)
    mask, number = choice.kept(strip, scores, choice.allowed(strip))
    # A query whose own key is hidden may have no near key: then it keeps all.
    every_row_keeps = strip.banded and choice.call.allowed is None
    if strip.banded and not every_row_keeps and not bool(number.all()):
        return _weights(choice, replace(strip, keys=choice.visible_keys(strip.queries), banded=False))
    every_row_keeps = every_row_keeps or is_true_on_cpu(number.all())
    weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1)
    if not every_row_keeps:
        weights = weights.masked_fill_((number == 0)[..., None], 0)
    return strip, weights, number


def _add_keys(total: Tensor, strip: Strip, call: AttentionCall, weights: Tensor, rows: Tensor) -> None:
    """Add weightsᵀ @ rows to the keys of a strip; heads that share a key add up."""
    shared = call.q.shape[1] // call.k.shape[1]
    heads = slice(strip.heads.start // shared, -(-strip.heads.stop // shared))
    keys = total[strip.samples, heads]
    shared_rows = rows.shape[1] * rows.shape[2] // keys.shape[1]
    left, right = (x.reshape(len(keys) * keys.shape[1], shared_rows, x.shape[3]) for x in (weights, rows))
    part = torch.bmm(left.mT, right).view(*keys.shape[:2], left.shape[2], keys.shape[3])
    if isinstance(strip.keys, slice):
        keys[:, :, strip.keys] += part
    else:
        keys.index_add_(2, strip.keys, part)


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
        grouped = q.shape[1] != k.shape[1]
        output = _flex(not FAILED)(q, k, v, modified, blocks, choice.call.scale, grouped)
    if rows is not None and rows.number is not None:
        number = rows.number
    return MaskedOutput(output, number, None if rows is None else rows.close.sum())


@cache
def _flex(dynamic: bool) -> Callable[..., Tensor]:
    """Return FlexAttention, which is compiled when it runs first: for all lengths, or for each length anew."""
    print("semdiag compiles FlexAttention for masks: once, up to a minute", file=sys.stderr, flush=True)
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic, fullgraph=True)


def row_thresholds(choice: Choice) -> Thresholds:
    """Return the scores halfway between each row's k-th and next one; positions tell equal ones apart."""
    if isinstance(choice.rule, TopP):
        top, order, number = _heaviest_scores(choice, choice.rule.p)
    else:
        top, order = _top_scores(choice)
        number = None
    k = integers(*choice.counts, device=top.device)[:, None, None].expand(*top.shape[:3], 1)
    last, after = (top.gather(-1, rank)[..., 0] for rank in ((k - 1).clamp(min=0), k))
    place = order.gather(-1, (k - 1).clamp(min=0))[..., 0]
    near = _error(choice.call) + 2.0**-22 * last.abs().nan_to_num(0, 0, 0)
    middle = after + (last - after) / 2
    middle = torch.where(middle > after, middle, last).masked_fill(after == -torch.inf, -torch.inf)
    tied = (last == after) & (after > -torch.inf)
    none = k[..., 0] == 0
    high = torch.where(tied, last + 2 * near, middle).masked_fill(none, torch.inf)
    low = torch.where(tied, last - 2 * near, middle).masked_fill(none, torch.inf)
    return Thresholds(high, low, place, (last - after <= 4 * near) & (after > -torch.inf) & ~none, number)


def _top_scores(choice: Choice) -> tuple[Tensor, Tensor]:
    """Return the k + 1 largest scores of each row, (B, H, Lq, k + 1), and the places of the first k."""
    call = choice.call
    most = max(choice.counts)
    if call.q.is_cuda and kernels.refusal(call.q, None, most) is None:
        free = call.allowed
        strip = Strip(slice(None), slice(0, call.q.shape[1]), slice(0, call.q.shape[2]), slice(0, call.k.shape[2]))
        fixed = choice.fixed(strip)
        if fixed is not None:
            free = ~fixed if free is None else free & ~fixed
        scores = Scores(call.q, call.k, call.scale, free, call.bias, None, call.causal, call.first_query)
        rows = kernels.rows_by_kernels(scores, most, None, False)[0]
        return rows["top"], rows["order"]
    top = torch.empty(*call.q.shape[:3], most + 1, device=call.q.device)
    order = torch.empty(*call.q.shape[:3], most, dtype=torch.int32, device=call.q.device)
    for strip in choice.strips():
        values = choice.scores(strip).masked_fill_(~choice.free(strip), -torch.inf)
        top[strip.rows], order[strip.rows] = largest_scores(values, most)
    return top, order


def _heaviest_scores(choice: Choice, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's last score that a share of p keeps and the next one, its place, and how many are kept."""
    call = choice.call
    top = torch.empty(*call.q.shape[:3], 2, device=call.q.device)
    order = torch.empty(*call.q.shape[:3], 1, dtype=torch.int32, device=call.q.device)
    number = torch.empty_like(order[..., 0])
    for strip in choice.strips():
        values = choice.scores(strip).masked_fill_(~choice.free(strip), -torch.inf)
        values, places = F.pad(values, (0, 1), value=-torch.inf).sort(dim=-1, descending=True, stable=True)
        count = heaviest(values, p).sum(-1, keepdim=True)
        last = (count - 1).clamp(min=0)
        top[strip.rows] = values.gather(-1, torch.cat([last, count], -1))
        order[strip.rows] = places.gather(-1, last).int()
        number[strip.rows] = count[..., 0].int()
    return top, order, number


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
    length = call.k.shape[2]
    sinks = getattr(choice.rule, "sinks", 0)
    shapes = (call.q.shape, length, call.first_query, call.causal, call.q.device)
    key = (*choice.counts, choice.window, sinks, *shapes)
    cached = call.allowed is None and table is None
    if cached and key in _LAYOUTS:
        return _LAYOUTS[key]
    heads = 1 if table is None else table.mask.shape[1]
    step = max(1, _AT_ONCE // (length * len(call.q) * heads) // _BLOCK) * _BLOCK
    starts = range(0, call.q.shape[2], step)
    parts = [_layout_of_rows(choice, table, slice(i, min(i + step, call.q.shape[2]))) for i in starts]
    number, bare, partial, full = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    from torch.nn.attention.flex_attention import BlockMask

    blocks = BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_mask_mod(choice, None if cached else bare, table),
        seq_lengths=(call.q.shape[2], length),
    )
    layout = number, None if cached else bare, blocks
    if cached:
        while len(_LAYOUTS) >= 8:
            del _LAYOUTS[next(iter(_LAYOUTS))]
        _LAYOUTS[key] = layout
    return layout


def _layout_of_rows(
    choice: Choice, table: GroupedMask | None, rows: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return some queries' numbers of kept keys, whether there is none, and the blocks seen in part and wholly."""
    call = choice.call
    length = call.k.shape[2]
    strip = Strip(slice(None), slice(0, call.q.shape[1]), rows, slice(0, length))
    visible = choice.allowed(strip)
    keys = count_true(visible)
    fixed = choice.fixed(strip)
    if fixed is not None:
        fixed = fixed & visible
    if table is not None:
        mask = table.part(slice(None), rows, slice(None)) & visible
        fixed = mask if fixed is None else fixed | mask
    k = integers(*choice.counts, device=call.q.device)[:, None].int()
    determined = choice.by_position or table is not None
    if fixed is None:
        number = k.minimum(keys)
    else:
        number = count_true(fixed)
        if not determined:
            number = number + k.minimum(keys - number)
    bare = number == 0  # a query without any key keeps all
    if determined and fixed is not None:
        visible = fixed | (visible & bare[..., None])
    inside = F.pad(visible, (0, -length % _BLOCK, 0, -visible.shape[2] % _BLOCK)).view(torch.uint8)
    inside = inside.view(*inside.shape[:2], -1, _BLOCK, inside.shape[3] // _BLOCK, _BLOCK)
    inside = inside.sum((3, 5), dtype=torch.int32)
    partial = (inside > 0) & (inside < _BLOCK**2)
    return torch.where(bare, keys, number), bare, partial, inside == _BLOCK**2


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of keys for each block of queries, and their positions, those first."""
    order = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def _at(values: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if values is None else part_of(values, slice(None), slice(None)).expand(shape)  # type: ignore[union-attr]


def _mask_mod(choice: Choice, bare: Tensor | None, table: GroupedMask | None) -> Callable[..., Tensor]:
    """Return whether a query attends to a key, as far as scores do not matter."""
    call = choice.call
    causal = call.causal
    allowed = _at(call.allowed, (*call.q.shape[:3], call.k.shape[2]))
    in_mask = _kept_mod(choice, table)
    first = integers(call.first_query, device=call.q.device)
    keeps_everything = None if bare is None else bare.expand(call.q.shape[:3])

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        mask = k >= 0
        if in_mask is not None:
            mask = in_mask(b, h, q, k)
            if keeps_everything is not None:
                mask = mask | keeps_everything[b, h, q]
        if causal:
            mask = mask & (k <= q + first[0])
        return mask if allowed is None else mask & allowed[b, h, q, k]

    return visible


def _kept_mod(choice: Choice, table: GroupedMask | None) -> Callable[..., Tensor] | None:
    """Return whether a key is kept by a table or, without scores, for its position; None: that does not say it."""
    positions = _positions_mod(choice)
    if table is None:
        if positions is None or not choice.by_position:
            return None

        def by_position(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return positions(b, q, k)

        return by_position
    batch, heads, _, _ = choice.call.q.shape
    mask = table.mask.expand(batch, heads, -1, -1)
    rows, columns = (x.expand(batch, -1).contiguous() for x in (table.query_groups, table.key_groups))

    def by_table(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_table = mask[b, h, rows[b, q], columns[b, k]]
        return in_table if positions is None else in_table | positions(b, q, k)

    return by_table


def _score_mod(choice: Choice, rows: Thresholds | None) -> Callable[..., Tensor] | None:
    call = choice.call
    bias = _at(call.bias, (*call.q.shape[:3], call.k.shape[2]))
    positions = _positions_mod(choice)
    if rows is None and bias is None:
        return None
    high, low, place = (None,) * 3 if rows is None else rows[:3]

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if bias is not None:
            score = score + bias[b, h, q, k]
        if high is None or low is None or place is None:
            return score
        mask = (score >= high[b, h, q]) | ((score >= low[b, h, q]) & (k <= place[b, h, q]))
        if positions is not None:
            mask = mask | positions(b, q, k)
        return torch.where(mask, score, -torch.inf)

    return modified


def _positions_mod(choice: Choice) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return whether keys are kept for their position, as a function of sample, query and key; None: none is."""
    call = choice.call
    windowed = choice.window is not None
    if not windowed and choice.sinks is None:
        return None
    numbers = integers(call.first_query, *(choice.window or (0, 0)), device=call.q.device)
    sinks = None if choice.sinks is None else choice.sinks.expand(len(call.q), -1).contiguous()

    def by_position(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        back = q + numbers[0] - k
        inside = (back <= numbers[1]) & (back >= -numbers[2])
        if sinks is None:
            return inside
        return inside | sinks[b, k] if windowed else sinks[b, k]

    return by_position
