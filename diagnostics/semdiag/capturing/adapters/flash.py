"""Capture flash-attention kernels at Hugging Face's interface: which keys each query sees in packed rows."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.adapters.interface_call import InterfaceCall
from semdiag.capturing.attention_call import AttentionCall

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # read if all are given
# Other options of the interface's function; a test compares them with the installed transformers.
OPTIONS = ("attention_mask", "dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "cache")


class NotFollowedError(Exception):
    """Raised for a form of the kernels' arguments that is not supported; the message says which."""


def flash_call(given: InterfaceCall, output: Tensor) -> AttentionCall:
    """Describe a call of a flash-attention kernel."""
    options = given.options
    if options.get("cache") is not None or options.get("block_table") is not None:
        raise NotFollowedError("its keys are in the pages of a cache")
    before = given.keys_before
    q, k, v = (x.detach().to(output.dtype) for x in (given.q, given.k, given.v))  # as in mixed precision
    causal, window = given.causal(True), options.get("sliding_window")
    if window is not None and k.shape[2] <= window:
        window = None
    mask = options.get("attention_mask")
    if mask is not None:
        if mask.ndim != 2:
            raise NotFollowedError(f"its mask has {mask.ndim} axes, not 2")
        mask = mask.bool()
        k, v = k[:, :, : mask.shape[1]], v[:, :, : mask.shape[1]]  # a static cache has unused room
    q_length, k_length = q.shape[2], k.shape[2]
    rule = causal and k_length >= q_length
    if mask is not None:
        allowed, queries, by_rule = _masked(mask, q_length, k_length, causal, window)
    elif (sequences := _sequences(options, q, k)) is not None or window is not None or rule != causal:
        one = torch.zeros(len(q), max(q_length, k_length), dtype=torch.long, device=q.device)
        numbers = sequences or (one[:, :q_length], one[:, :k_length])
        queries = numbers[0] >= 0
        allowed, by_rule = _seen((queries, numbers[1] >= 0), numbers, causal, window), False
    else:
        allowed, queries, by_rule = None, None, rule
    return replace(given, q=q, k=k, v=v).attention(
        output,
        allowed,
        queries=queries,
        causal=by_rule,
        first_query=max(0, k_length - q_length) if causal else 0,
        keys_before=before if causal else 0,
    )


def _masked(
    mask: Tensor, q_length: int, k_length: int, causal: bool, window: int | None
) -> tuple[Tensor, Tensor | None, bool]:
    """Apply a mask (B, Lk) of real tokens."""
    if q_length == k_length and window is None:
        return mask[:, None, None], mask, causal
    queries = mask if q_length == k_length else mask[:, -q_length:] if q_length > 1 else None
    real = mask.new_ones(len(mask), 1) if queries is None else queries
    return _seen((real, mask), (real.long() * 0, mask.long() * 0), causal, window), queries, False


def _sequences(options: dict[str, Any], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the sequence of each query (1, Lq) and key (1, Lk), -1 for none; None if they are not packed."""
    lengths = q.shape[2], k.shape[2]
    if all(options.get(name) is not None for name in _PACKED):
        if len(q) != 1:
            raise NotFollowedError("packed sequences fill more than one row")
        first, second = (_numbered(options[x], n) for x, n in zip(_PACKED[:2], lengths, strict=True))
        return first, second
    positions = options.get("position_ids")
    if positions is None or len(q) != 1 or positions.shape[-1] == 1:
        return None
    if positions.numel() != lengths[0]:
        raise NotFollowedError("its positions are not one per query")
    positions = positions.reshape(1, -1)
    lowest = positions.min()
    if bool((positions == lowest + torch.arange(lengths[0], device=positions.device)).all()):
        return None
    if lengths[0] != lengths[1]:
        raise NotFollowedError("packed sequences have keys besides their own")
    number = (positions == lowest).cumsum(-1) - 1
    return number, number


def _numbered(ends: Tensor, length: int) -> Tensor:
    places = torch.arange(length, device=ends.device)
    number = torch.bucketize(places, ends[1:].long(), right=True)
    return number.masked_fill((places < ends[0]) | (places >= ends[-1]), -1)[None]


def _seen(real: tuple[Tensor, Tensor], numbers: tuple[Tensor, Tensor], causal: bool, window: int | None) -> Tensor:
    """Return which keys each query sees, (B, 1, Lq, Lk) bool."""
    ranks, counts = [], []
    for there, number in zip(real, numbers, strict=True):
        number = number.clamp(min=0)
        size = len(there), int(max(n.max() for n in numbers)) + 1
        count = torch.zeros(size, dtype=torch.long, device=there.device).scatter_add_(1, number, there.long())
        before = (count.cumsum(1) - count).gather(1, number)
        ranks.append(there.cumsum(1) - 1 - before)
        counts.append(count)
    own = numbers[0].clamp(min=0)
    place = (ranks[0] + (counts[1] - counts[0]).gather(1, own))[:, :, None]
    keys = ranks[1][:, None]
    seen = real[0][:, :, None] & real[1][:, None] & (numbers[0][:, :, None] == numbers[1][:, None])
    if causal:
        seen = seen & (keys <= place)
    if window is not None:
        seen = seen & ((keys - place).abs() < window)
    return seen[:, None]
