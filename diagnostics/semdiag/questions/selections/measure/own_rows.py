"""What one selection of a model chose: experts or keys, row by row."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from semdiag.capturing.batches import Batch, entries, samples_of
from semdiag.capturing.token_masks import real_tokens
from semdiag.mathematics.selections.allowed_keys import AllowedKeys
from semdiag.mathematics.selections.margins import margins
from semdiag.mathematics.selections.number_formats import NumberFormat, number_format
from semdiag.mathematics.selections.top_k_check import GRAVITY, judge_rows
from semdiag.questions.selections.measure.arrays import flat_rows
from semdiag.questions.selections.measure.stages import outside
from semdiag.questions.selections.measure.watch import Selected

_OF_EXPERTS = ("rout", "gate", "expert", "moe")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch."""

    samples: int  # their number
    lengths: frozenset[int]  # of its sequences of token ids; empty if there are none
    real: dict[str, Tensor]  # (samples, length) bool by argument, false for padding


def tokens_of(model: nn.Module, batch: Batch) -> Tokens:
    """Return the tokens of a batch of a model."""
    tensors = [value for _, value in entries(batch) if isinstance(value, Tensor) and value.ndim == 2]
    lengths = frozenset(value.shape[1] for value in tensors if not value.is_floating_point())
    return Tokens(samples_of(batch), lengths, real_tokens(model, batch))


def causal_modules(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules inside one that says that it is causal."""
    return frozenset(
        name if not inner else f"{name}.{inner}" if name else inner
        for name, module in model.named_modules()
        if getattr(module, "is_causal", False) is True
        for inner, _ in module.named_modules()
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


def kind_of(text: str, shape: tuple[int, ...], tokens: Tokens) -> str:
    """Return what a selection chooses, from the shape of its scores; empty if its rows are not tokens."""
    rows = torch.Size(shape[:-1]).numel()
    flat = len(shape) == 2
    length = rows // tokens.samples if flat else shape[-2] if len(shape) > 2 else 0
    known = length in tokens.lengths if tokens.lengths else length > 1  # a single row is the whole sample
    if not length or rows % tokens.samples or not known:
        return ""
    if flat or shape[0] != tokens.samples:
        return "experts" if flat else ""
    named = any(word in text for word in _OF_EXPERTS) and "index" not in text
    if shape[-1] == length:
        return "experts" if named and len(shape) == 3 else "keys"
    return "blocks" if "index" in text or len(shape) > 3 else "experts"


@dataclass(frozen=True)
class Place:
    """Where a selection stands."""

    text: str  # names of the module and its class, in lower case
    kind: str  # of :func:`kind_of`
    causal: bool  # whether keys after the query are forbidden
    tokens: Tokens  # of the batch


@dataclass(frozen=True, eq=False)
class Choices:
    """What a selection could choose and chose, row by row."""

    kind: str  # of :func:`kind_of`
    shape: tuple[int, ...]  # of the rows: samples, other axes, tokens
    indices: Tensor  # int64 (rows, k), -1 where nothing could be chosen
    order: Tensor  # (rows, n) scores in whose order it chose, -inf for forbidden choices
    real: Tensor  # bool (rows,), false for padding
    first: Tensor  # int64 (rows,), the first key that is not padding; 0 for experts

    @property
    def available(self) -> Tensor:
        """Return which choices no mask forbids, bool (rows, n); groups that were not chosen are forbidden."""
        return self.order > torch.finfo(self.order.dtype).min / 2

    @property
    def kept(self) -> Tensor:
        """Return which available choices were chosen, bool (rows, n)."""
        marked = torch.zeros(len(self.order), self.order.shape[1] + 1, dtype=torch.bool)
        marked.scatter_(1, self.indices.where(self.indices >= 0, self.order.shape[1]), True)
        return marked[:, :-1] & self.available


def own_rows(
    place: Place, chosen: Selected, group: Selected | None, into: NumberFormat
) -> tuple[OwnRows, Choices]:
    """Return what a selection chose for all real tokens together, and token by token."""
    k, n, keys = chosen.indices.shape[-1], chosen.scores.shape[-1], place.kind == "keys"
    choices, allowed, unmatched = choices_of(place, chosen, group)
    indices, order, counts = choices.indices, choices.order, choices.real
    format_of_scores = number_format(str(chosen.scores.dtype))
    grades = judge_rows(flat_rows(chosen.scores).cpu(), indices, n, allowed, format_of_scores)[0]
    margin, certified = margins(order[counts], k, into)
    if group is not None:
        of_groups, sure = margins(flat_rows(group.order).cpu()[counts], group.indices.shape[-1], into)
        margin, certified = torch.minimum(margin, of_groups), certified & sure
    hit = (indices[counts] == allowed.first[counts, None]).any(1) & (margin < torch.inf)
    experts = place.kind == "experts" and not chosen.positions
    rows = OwnRows(
        place.kind, n, k, _groups(group), chosen.by_logits, margin, certified,
        counts=Counter(GRAVITY[grade] for grade in grades.tolist()),
        padded=int((~counts).sum()),
        load=torch.bincount(indices[counts].flatten(), minlength=n) if experts else None,
        first_kept=int(hit.sum()) if keys else 0,
        causal=place.causal,
        unmatched=unmatched,
    )  # fmt: skip
    return rows, choices


def choices_of(place: Place, chosen: Selected, group: Selected | None) -> tuple[Choices, AllowedKeys, bool]:
    """Return what a selection could choose and chose."""
    n, keys = chosen.scores.shape[-1], place.kind == "keys"
    flat, samples = chosen.scores.ndim == 2, place.tokens.samples
    shape = (samples, len(chosen.scores) // samples) if flat else tuple(chosen.scores.shape[:-1])
    real, unmatched = _real(place, shape[-1])
    allowed = _allowed(shape, n, real, keys, place.causal)
    indices = flat_rows(chosen.indices).cpu().long()
    indices = _without_fillers(indices, allowed) if keys else indices
    order = _of_allowed(flat_rows(chosen.order).cpu(), allowed)
    if group is not None:
        order = order.masked_fill(outside(group, n).cpu(), -torch.inf)
    return Choices(place.kind, shape, indices, order, allowed.counts, allowed.first), allowed, unmatched


def _groups(group: Selected | None) -> tuple[int, int] | None:
    """Return how many groups there are and how many are chosen; None if all are."""
    sizes = None if group is None else (group.scores.shape[-1], group.indices.shape[-1])
    return sizes if sizes is not None and sizes[1] < sizes[0] else None


def _real(place: Place, length: int) -> tuple[Tensor | None, bool]:
    """Return which tokens of a selection's rows are real (None: all), and whether that is unknown."""
    tokens, decodes = place.tokens, "decoder" in place.text
    fitting = {name: mask for name, mask in tokens.real.items() if tuple(mask.shape) == (tokens.samples, length)}
    names = [name for name in fitting if name.startswith("decoder") == decodes] or list(fitting)
    if names:
        return fitting[names[0]].cpu(), False
    return None, any(not bool(mask.all()) for mask in tokens.real.values())


def _allowed(shape: tuple[int, ...], n: int, real: Tensor | None, keys: bool, causal: bool) -> AllowedKeys:
    """Return the choices of each row: every expert; keys that are not padding and not after the query."""
    axes = (shape[0], *(1 for _ in shape[1:-1]))
    counts = torch.ones(shape, dtype=torch.bool) if real is None else real.view(*axes, shape[-1]).expand(shape)
    first, end, position = torch.zeros(shape, dtype=torch.int64), torch.full(shape, n), None
    if keys and real is not None:
        marked = real.view(*axes, 1, n).int()
        first = marked.argmax(-1).expand(shape)
        end = (n - marked.flip(-1).argmax(-1)).expand(shape)
    if keys and causal:
        position = torch.arange(n).expand(shape)
        end = torch.maximum(first, torch.minimum(end, position + 1))
        position = position.flatten()
    return AllowedKeys(first.flatten(), end.flatten(), position, counts.flatten())


def _without_fillers(indices: Tensor, allowed: AllowedKeys) -> Tensor:
    """Return indices with -1 for forbidden keys of rows that chose all others: a top-k must return k keys."""
    inside = (indices >= allowed.first[:, None]) & (indices < allowed.end[:, None])
    full = inside.sum(1) >= allowed.end - allowed.first
    return indices.masked_fill(full[:, None] & ~inside, -1)


def _of_allowed(order: Tensor, allowed: AllowedKeys) -> Tensor:
    """Return scores, -inf where a row may not choose."""
    at = torch.arange(order.shape[1])
    return order.masked_fill((at < allowed.first[:, None]) | (at >= allowed.end[:, None]), -torch.inf)
