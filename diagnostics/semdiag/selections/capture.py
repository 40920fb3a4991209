"""Selections of a model while it runs: the experts or keys that it chose, row by row."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.batches import Batch, entries, real_tokens, samples_of
from semdiag.capturing.recording import outside_all_modes
from semdiag.mathematics.rounding import NumberFormat, number_format
from semdiag.mathematics.selections import FAULTS, GRAVITY, AllowedKeys, judge_rows, margins
from semdiag.selections.files import flat_rows

_ATEN = torch.ops.aten
_LARGEST_LOGITS = 3  # axes: those of routers have two or three, those of attention four


@dataclass(eq=False)
class Selected:
    """One selection, as it ran."""

    scores: Tensor  # (..., n), as given to the selection; negated if it takes the smallest
    order: Tensor  # (..., n), scores in the same order: the logits of a softmax or a sigmoid that made the scores
    indices: Tensor  # (..., k)
    positions: bool = False  # whether the indices are positions in a table of other indices, which are the choices


Consume = Callable[[str, nn.Module, list[Selected]], None]


@contextmanager
def watch_selections(model: nn.Module, consume: Consume) -> Iterator[None]:
    """Call ``consume`` with a module's name, the module and its selections after each of its forwards."""
    names = {module: name for name, module in model.named_modules()}
    watch = _Watch()

    def before(module: nn.Module, inputs: object) -> None:
        if module in names:
            watch.frames.append([])

    def after(module: nn.Module, inputs: object, output: object) -> None:
        if module in names and watch.frames:
            selected = watch.frames.pop()
            watch.forget()
            if selected:
                with outside_all_modes(selected[0].scores.device.type):
                    consume(names[module], module, selected)

    started = register_module_forward_pre_hook(before)
    ended = register_module_forward_hook(after, always_call=True)
    try:
        with watch:
            yield
    finally:
        started.remove()
        ended.remove()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.frames: list[list[Selected]] = []
        self._logits: tuple[Tensor, Tensor] | None = None  # the last softmax or sigmoid: its result and its input
        self._sorted: tuple[Tensor, Tensor] | None = None  # the last sorting: its indices, and scores

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        handle = _HANDLERS.get(func)
        if handle is not None and self.frames:
            handle(self, result, *args, **(kwargs or {}))
        return result

    def forget(self) -> None:
        self._logits = self._sorted = None

    def _add(self, scores: Tensor, indices: Tensor, largest: bool) -> None:
        if not scores.is_floating_point() or not indices.numel():
            return
        copied = (scores if largest else -scores).detach().clone()  # the model may change them in place
        has_logits = self._logits is not None and self._logits[0] is scores and largest
        order = self._logits[1].detach().clone() if has_logits and self._logits is not None else copied
        self.frames[-1].append(Selected(copied, order, indices))

    def topk(
        self, result: Any, scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> None:
        if _last(scores, dim):
            self._add(scores, result[1], largest)

    def argmax(self, result: Tensor, scores: Tensor, dim: int | None = None, keepdim: bool = False) -> None:
        if dim is not None and _last(scores, dim):
            self._add(scores, result if keepdim else result[..., None], True)

    def sort(
        self, result: Any, scores: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None
    ) -> None:
        if _last(scores, dim) and scores.is_floating_point():
            self._sorted = result[1], scores if descending else -scores

    def sliced(
        self,
        result: Tensor,
        of: Tensor,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
    ) -> None:
        if self._sorted is None or of is not self._sorted[0] or not _last(of, dim) or step != 1:
            return
        begin, stop, _ = slice(start, end).indices(of.shape[-1])
        if begin == 0:
            self._add(self._sorted[1], result, True)
        elif stop == of.shape[-1]:
            self._add(self._sorted[1], result, False)

    def gather(self, result: Tensor, table: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> None:
        if not table.is_floating_point() and table.dtype != torch.bool:
            for selected in self.frames[-1]:
                selected.positions |= selected.indices is index

    def softmax(self, result: Tensor, logits: Tensor, dim: int = -1, half_to_float: bool = False) -> None:
        if _last(logits, dim) and logits.ndim <= _LARGEST_LOGITS:
            self._logits = result, logits


def _last(scores: Tensor, dim: int) -> bool:
    return scores.ndim > 0 and dim % scores.ndim == scores.ndim - 1


_HANDLERS: dict[Any, Callable[..., None]] = {
    _ATEN.topk.default: _Watch.topk, _ATEN.argmax.default: _Watch.argmax, _ATEN.sort.default: _Watch.sort,
    _ATEN.sort.stable: _Watch.sort, _ATEN.slice.Tensor: _Watch.sliced, _ATEN.gather.default: _Watch.gather,
    _ATEN._softmax.default: _Watch.softmax, _ATEN.sigmoid.default: _Watch.softmax,
}  # fmt: skip


def in_stages(selected: list[Selected]) -> list[tuple[Selected, Selected | None]]:
    """Return the selections of a module that decide, each with the selection of groups before it."""
    pairs: list[tuple[Selected, Selected | None]] = []
    for last in selected:
        group = next((early for early, _ in reversed(pairs) if _chooses_groups(early, last)), None)
        if group is not None:
            inside = group.scores.numel()  # rows of a selection that was made inside each of the groups
            pairs = [p for p in pairs if p[0] is not group and p[0].scores.shape[:-1].numel() != inside]
        pairs.append((last, group))
    return pairs


def outside(group: Selected, choices: int) -> Tensor:
    """Return which choices lie in groups that were not chosen, bool (rows, choices)."""
    dropped = torch.ones_like(flat_rows(group.scores), dtype=torch.bool)
    dropped.scatter_(1, flat_rows(group.indices).long(), False)
    return dropped.repeat_interleave(choices // dropped.shape[1], 1)


def _chooses_groups(early: Selected, last: Selected) -> bool:
    """Return whether the later selection chooses in groups that the earlier one left, all others masked alike."""
    groups = early.scores.shape[-1]
    choices = last.scores.shape[-1]
    if groups >= choices or choices % groups or early.scores.numel() * choices != last.scores.numel() * groups:
        return False
    dropped = outside(early, choices)
    scores = flat_rows(last.scores)
    masked = (scores == scores.amin(1, keepdim=True)) | ~dropped
    return bool(masked.all()) and not bool(dropped.gather(1, flat_rows(last.indices).long()).any())


_OF_EXPERTS = ("rout", "gate", "expert", "moe")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch."""

    samples: int  # their number
    lengths: frozenset[int]  # lengths of its sequences of token ids; empty if there are none
    real: dict[str, Tensor]  # (samples, length) bool by argument, false for padding


def tokens_of(model: nn.Module, batch: Batch) -> Tokens:
    """Return the tokens of a batch of a model."""
    tensors = [value for _, value in entries(batch) if isinstance(value, Tensor) and value.ndim == 2]
    lengths = frozenset(value.shape[1] for value in tensors if not value.is_floating_point())
    return Tokens(samples_of(batch), lengths, real_tokens(model, batch))


def causal_modules(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules inside one that says that it is causal."""
    return frozenset(
        inner
        for name, module in model.named_modules()
        if getattr(module, "is_causal", False) is True
        for inner, _ in module.named_modules(prefix=name)
    )


@dataclass(frozen=True)
class OwnRows:
    """What a selection chose for the tokens of a batch."""

    kind: str  # ``experts``; ``keys``, the tokens themselves; ``blocks`` of keys
    choices: int  # n
    k: int  # how many are chosen
    groups: tuple[int, int] | None  # how many groups there are, and how many of them are chosen first
    logits: bool  # whether margins are those of logits
    margin: Tensor  # float64 (rows,), +inf where there is nothing to decide
    certified: Tensor  # bool (rows,)
    counts: Counter[str]  # rows by class, see ``check_selection``
    padded: int  # number of rows of padding, which are left out
    load: Tensor | None  # (n,) how many rows chose each expert; None: unknown
    first_kept: int  # number of rows that had to leave out a key and kept the first one
    causal: bool  # whether keys after the query are known to be forbidden
    unmatched: bool  # whether some tokens are padding, but their rows are unknown
    faulty: pd.DataFrame  # a row for each faulty one: its place, class and scores


def kind_of(text: str, shape: tuple[int, ...], tokens: Tokens) -> str:
    """Return what a selection chooses, from the shape of its scores; empty if its rows are not tokens."""
    length = _sequence_length(shape, tokens)
    if not length:
        return ""
    if len(shape) == 2:
        return "experts"
    if shape[0] != tokens.samples:
        return ""
    of_indexer = "index" in text
    if shape[-1] == length:
        of_router = any(word in text for word in _OF_EXPERTS) and not of_indexer
        return "experts" if of_router and len(shape) == 3 else "keys"
    return "blocks" if of_indexer or len(shape) > 3 else "experts"


def _sequence_length(shape: tuple[int, ...], tokens: Tokens) -> int:
    """Return how many tokens of a sample scores are of; 0 if their rows are not tokens."""
    rows = torch.Size(shape[:-1]).numel()
    if len(shape) < 2 or rows % tokens.samples:
        return 0
    length = rows // tokens.samples if len(shape) == 2 else shape[-2]
    is_sequence = length in tokens.lengths if tokens.lengths else length > 1  # a single row is the whole sample
    return length if is_sequence else 0


@dataclass(frozen=True)
class BlockRule:
    """Which blocks of keys a query of an indexer may choose."""

    size: int  # keys of a block
    complete: bool  # whether the last key of a block must not stand after the query; else its first key
    after_padding: bool  # whether blocks count from the first real token


_BLOCK_RULES = {  # by the attribute of an indexer of transformers that holds the size
    "compress_rate": (True, False),  # DeepSeek-V4
    "index_kpool": (True, True),  # GLM-5-Next
    "compress_ratio": (True, True),  # Qwen4-Exp
    "block_size": (False, False),  # MiniMax-M3
}


def block_rule(module: nn.Module) -> BlockRule | None:
    """Return the rule of an indexer that chooses blocks; None: unknown."""
    rules = [
        BlockRule(size, complete, after_padding)
        for name, (complete, after_padding) in _BLOCK_RULES.items()
        if type(size := getattr(module, name, None)) is int and size > 0
    ]
    return rules[0] if len(rules) == 1 and "index" in type(module).__name__.lower() else None


def joined_queries(selected: list[Selected], rule: BlockRule | None, tokens: Tokens) -> list[Selected]:
    """Return selections of one query each, on vectors, as one selection; as they are if they are none such.

    A query without a complete block selects nothing; the others must have as many blocks as their tokens make.
    """
    if rule is None or not selected or any(each.scores.ndim != 1 for each in selected) or not tokens.real:
        return selected
    real = next(iter(tokens.real.values())).cpu()
    blocks = real.int().cumsum(1) // rule.size
    running = (blocks.flatten() > 0).nonzero().flatten()
    if [len(each.scores) for each in selected] != blocks.flatten()[running].tolist():
        return selected
    width = max(len(each.scores) for each in selected)
    k = max(len(each.indices) for each in selected)
    scores = selected[0].scores.new_full((blocks.numel(), width), -torch.inf)
    indices = torch.full((blocks.numel(), k), -1)
    for row, each in zip(running.tolist(), selected, strict=True):
        scores[row, : len(each.scores)] = each.scores
        indices[row, : len(each.indices)] = each.indices.cpu()
    shape = tuple(real.shape)
    table = scores.view(*shape, width)
    return [Selected(table, table, indices.view(*shape, k).to(scores.device))]


@dataclass(frozen=True, eq=False)
class Choices:
    """What a selection could choose and chose, row by row."""

    kind: str  # what :func:`kind_of` returns
    shape: tuple[int, ...]  # axes of the rows: samples, others, tokens
    indices: Tensor  # int64 (rows, k), -1 where nothing could be chosen
    order: Tensor  # (rows, n) scores in whose order it chose, -inf for padding and other groups
    real: Tensor  # bool (rows,), false for padding
    first: Tensor  # int64 (rows,), the first key that is not padding; 0 for experts


def own_rows(
    text: str,
    causal: bool,
    tokens: Tokens,
    chosen: Selected,
    group: Selected | None,
    into: NumberFormat,
    rule: BlockRule | None = None,
) -> tuple[OwnRows, Choices] | None:
    """Return what a selection chose for all real tokens, together and token by token; None if not by token."""
    kind = kind_of(text, tuple(chosen.scores.shape), tokens)
    if not kind:
        return None
    k = chosen.indices.shape[-1]
    n = chosen.scores.shape[-1]
    keys = kind == "keys"
    shape = tuple(chosen.scores.shape[:-1])
    if len(shape) == 1:  # the tokens of all samples
        shape = (tokens.samples, shape[0] // tokens.samples)
    real, unmatched = _real(tokens, text, shape[-1])
    rule = rule if kind == "blocks" and causal else None
    allowed = _allowed(shape, n, real, keys, causal) if rule is None else _allowed_blocks(shape, n, real, rule)
    counts = allowed.counts
    has_limits = keys or rule is not None
    indices = flat_rows(chosen.indices).cpu().long()
    if has_limits:
        indices = _without_surplus(indices, allowed)
    padding = _beyond(_allowed(shape, n, real, keys, causal=False), n)
    if group is not None:
        padding = padding | outside(group, n).cpu()
    by_model = flat_rows(chosen.order).cpu().masked_fill(padding, -torch.inf)
    order = by_model.masked_fill(_beyond(allowed, n), -torch.inf)
    format_of_scores = number_format(str(chosen.scores.dtype))
    judged = judge_rows(flat_rows(chosen.scores).cpu(), indices, n, allowed, format_of_scores)
    margin, certified = margins(order[counts], k, into)
    if group is not None:
        of_groups, sure = margins(flat_rows(group.order).cpu()[counts], group.indices.shape[-1], into)
        margin = torch.minimum(margin, of_groups)
        certified = certified & sure
    keeps_first = (indices[counts] == allowed.first[counts, None]).any(1) & (margin < torch.inf)
    experts = kind == "experts" and not chosen.positions
    by_logits = chosen.order is not chosen.scores
    rows = OwnRows(
        kind, n, k, _group_sizes(group), by_logits, margin, certified,
        counts=Counter(GRAVITY[grade] for grade in judged[0].tolist()),
        padded=int((~counts).sum()),
        load=torch.bincount(indices[counts].flatten(), minlength=n) if experts else None,
        first_kept=int(keeps_first.sum()) if keys else 0,
        causal=causal and has_limits,
        unmatched=unmatched,
        faulty=_faulty(judged, counts, shape),
    )  # fmt: skip
    return rows, Choices(kind, shape, indices, by_model, counts, allowed.first)


def _without_surplus(indices: Tensor, allowed: AllowedKeys) -> Tensor:
    """Return indices without the forbidden ones of rows that chose all others: a top-k must return k."""
    inside = (indices >= allowed.first[:, None]) & (indices < allowed.end[:, None])
    full = inside.sum(1) >= allowed.end - allowed.first
    return indices.masked_fill(full[:, None] & ~inside, -1)


def _group_sizes(group: Selected | None) -> tuple[int, int] | None:
    """Return how many groups there are, and how many of them are chosen; None if all are."""
    if group is None or group.indices.shape[-1] >= group.scores.shape[-1]:
        return None
    return group.scores.shape[-1], group.indices.shape[-1]


def _beyond(allowed: AllowedKeys, n: int) -> Tensor:
    """Return which of n choices a row may not make, bool (rows, n)."""
    at = torch.arange(n)
    return (at < allowed.first[:, None]) | (at >= allowed.end[:, None])


def _faulty(judged: tuple[Tensor, ...], counts: Tensor, shape: tuple[int, ...]) -> pd.DataFrame:
    """Return the faulty rows, by sample, head and token."""
    at = torch.tensor([name in FAULTS for name in GRAVITY])[judged[0].long()].nonzero().squeeze(1)
    sample, *heads, token = np.unravel_index(counts.nonzero().squeeze(1)[at].numpy(), shape)
    head = np.ravel_multi_index(heads, shape[1:-1]) if heads else np.zeros(len(at), np.int64)
    names = [GRAVITY[grade] for grade in judged[0][at].tolist()]
    worst, kth, left = (column[at].numpy() for column in judged[1:])
    return pd.DataFrame(
        {"sample": sample, "head": head, "token": token, "class": names,
         "worst_chosen": worst, "kth": kth, "left_out": left}
    )  # fmt: skip


def _real(tokens: Tokens, text: str, length: int) -> tuple[Tensor | None, bool]:
    """Return which tokens of a selection's rows are real (None: all), and whether that is unknown."""
    fitting = {name: mask for name, mask in tokens.real.items() if tuple(mask.shape) == (tokens.samples, length)}
    names = [name for name in fitting if name.startswith("decoder") == ("decoder" in text)] or list(fitting)
    if names:
        return fitting[names[0]].cpu(), False
    return None, any(not bool(mask.all()) for mask in tokens.real.values())


def _allowed_blocks(shape: tuple[int, ...], n: int, real: Tensor | None, rule: BlockRule) -> AllowedKeys:
    """Return the blocks of each row: those that are complete at its query, or have begun."""
    axes = (shape[0], *(1 for _ in shape[1:-1]), shape[-1])
    counts = torch.ones(shape, dtype=torch.bool) if real is None else real.view(axes).expand(shape)
    place = torch.arange(shape[-1]).expand(shape)
    if rule.after_padding and real is not None:
        place = place - real.int().argmax(-1).view(*axes[:-1], 1)
    blocks = (place + 1).clamp(min=0) // rule.size if rule.complete else place.clamp(min=0) // rule.size + 1
    end = blocks.clamp(max=n).flatten()
    return AllowedKeys(torch.zeros_like(end), end, end - 1, counts.flatten())


def _allowed(shape: tuple[int, ...], n: int, real: Tensor | None, keys: bool, causal: bool) -> AllowedKeys:
    """Return the choices of each row: every expert; keys that are not padding and not after the query."""
    axes = (shape[0], *(1 for _ in shape[1:-1]))
    counts = torch.ones(shape, dtype=torch.bool) if real is None else real.view(*axes, shape[-1]).expand(shape)
    first = torch.zeros(shape, dtype=torch.int64)
    end = torch.full(shape, n)
    position = None
    if keys and real is not None:
        marked = real.view(*axes, 1, n).int()
        first = marked.argmax(-1).expand(shape)
        end = (n - marked.flip(-1).argmax(-1)).expand(shape)
    if keys and causal:
        position = torch.arange(n).expand(shape)
        end = torch.maximum(first, torch.minimum(end, position + 1))
        position = position.flatten()
    return AllowedKeys(first.flatten(), end.flatten(), position, counts.flatten())
