"""Inputs that tell whether a mask can represent a task; attention of the trainer's step, forward and backward."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from semdiag_models.attention.selection import ATTENTIONS, DRAWN, random_priorities, select_keys
from semdiag_models.config import ModelConfig
from semdiag_models.encoder import Attention
from semdiag_models.tasks import Task
from semdiag_models.tasks.expressions import MODULUS
from semdiag_models.tasks.language_tasks import POP, PUSH_0

LONGEST = 256  # longest input that is examined
_TRIED = 1000  # number of sets of inputs that are tried
Witness = list[tuple[list[int], int]]  # inputs, each with a label that is not its own


def receptive_fields(config: ModelConfig) -> Tensor:
    """Return the tokens of the input on which each pooled output can depend."""
    length, front = config.length, config.cls_tokens
    positions = length + config.extra_tokens
    seen = torch.zeros(positions, length)
    seen[front : front + length] = torch.eye(length)
    for layer in range(config.blocks):
        seen = ((_steps(config, layer) @ seen) > 0).float()
    return (seen[:1] if config.pooling == "cls" else seen) > 0


def _steps(config: ModelConfig, layer: int) -> Tensor:
    """Return (P, P): 1 if a position sees another in one block; the residual stream shows each position itself."""
    positions = config.length + config.extra_tokens
    if ATTENTIONS[config.attention].keeps != "fixed":
        return torch.ones(positions, positions)
    everywhere, apart = config.everywhere, not config.cls_as_key
    blank, order = torch.zeros(1, config.heads, positions, 1), None
    if config.attention in DRAWN:
        cpu = torch.device("cpu")
        order = random_priorities(config.selection_seed, config.blocks, config.heads, positions, cpu)[layer]
    kept = select_keys(config.attention, config.k, blank, blank, 1.0, None, everywhere, order, apart=apart)
    assert kept is not None  # a fixed set
    steps = torch.zeros(config.heads, positions, positions + 1)
    steps = steps.scatter(2, kept[0].where(kept[0] >= 0, positions), 1.0).amax(0)[:, :positions]
    steps[: everywhere[0]] = 1.0
    steps[positions - everywhere[1] :] = 1.0
    return steps + torch.eye(positions)


@lru_cache(maxsize=256)
def cannot_represent(task: Task, config: ModelConfig, length: int | None = None) -> bool:
    """Return whether no weights can make a model with this mask right on every input of the task."""
    length = config.length if length is None else length
    fixed = ATTENTIONS[config.attention].keeps == "fixed"
    if not fixed or task.name not in WITNESSES or length > LONGEST:
        return False
    fields = {tuple(row.nonzero().flatten().tolist()) for row in receptive_fields(config)[:, :length]}
    if any(len(field) == length for field in fields):
        return False
    return any(_contradicts(task, inputs, fields) for inputs in islice(WITNESSES[task.name](task, length), _TRIED))


def _contradicts(task: Task, inputs: Witness, fields: set[tuple[int, ...]]) -> bool:
    labels = [task.label(tokens) for tokens, _ in inputs]
    assert all(label != other for label, (_, other) in zip(labels, inputs, strict=True))

    def seen(field: tuple[int, ...], of: list[int]) -> Counter[tuple[object, ...]]:
        return Counter((c, *(tokens[at] for at in field)) for (tokens, _), c in zip(inputs, of, strict=True))

    return all(seen(field, labels) == seen(field, [other for _, other in inputs]) for field in fields)


def _two_bits(length: int, places: Iterator[tuple[int, int]]) -> Iterator[Witness]:
    """Yield inputs of zeros except for two bits, whose sum modulo 2 is the label."""
    for a, b in places:
        inputs: Witness = []
        for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
            tokens = [0] * length
            tokens[a], tokens[b] = first, second
            inputs.append((tokens, 1 - (first ^ second)))
        yield inputs


def _parity(task: Task, length: int) -> Iterator[Witness]:
    return _two_bits(length, ((a, b) for b in reversed(range(length)) for a in range(b)))


def _even_pairs(task: Task, length: int) -> Iterator[Witness]:
    return _two_bits(length, iter([(0, length - 1)] * (length > 1)))


def _missing_duplicate(task: Task, length: int) -> Iterator[Witness]:
    """Yield two pairs of inputs that differ in whether a token is missing, seen by different positions."""
    half = length // 2

    def hidden(at: int, bit: int, other: int, value: int) -> Iterator[list[int]]:
        for place in (at, at + half):
            tokens = [0] * (2 * half) + [task.pad_id] * (length % 2)
            for position, one in ((at, bit), (at + half, bit), (other, value), (other + half, value)):
                tokens[position] = one
            tokens[place] = 2
            yield tokens

    for a in range(half):
        for b in range(a + 1, half):
            inputs: Witness = []
            for at, other in ((a, b), (b, a)):
                inputs += [(tokens, 0) for tokens in hidden(at, 1, other, 0)] * 2
                inputs += [(tokens, 1) for value in (0, 1) for tokens in hidden(at, 0, other, value)]
            yield inputs


def _stack_manipulation(task: Task, length: int) -> Iterator[Witness]:
    """Yield inputs in which the last two actions decide which of two bottom bits comes to the top."""
    bits = 3 + (length - 5) % 2
    fill = (length - bits - 2) // 2
    if fill < 0:
        return
    inputs: Witness = []
    for top, third in ((0, 1), (1, 0)):
        start = [0] * (bits - 3) + [third, 0, top] + [PUSH_0, POP] * fill
        inputs += [([*start, PUSH_0, POP], 1 - top), ([*start, POP, POP], 1 - third)]
    yield inputs


def _cycle_navigation(task: Task, length: int) -> Iterator[Witness]:
    """Yield inputs with up to four steps forward at each end, for every sum of two residues."""
    ends = MODULUS - 1
    if length < 2 * ends:
        return
    middle = [1] * (length - 2 * ends)
    residues = {n: [2] * n + [1] * (ends - n) for n in range(MODULUS)}
    yield [([*residues[a], *middle, *residues[b]], (a + b + 1) % MODULUS) for a in residues for b in residues]


def _filler(length: int) -> str:
    """Return an expression of this many characters with value 0."""
    short = {1: "0", 2: "-0", 3: "(0)", 4: "(-0)"}
    return short[length] if length in short else f"(0+{_filler(length - 4)})"


def _modular_arithmetic(task: Task, length: int) -> Iterator[Witness]:
    """Yield sums of a digit at the start and one at the end."""
    if length >= 9:
        digits = range(MODULUS)
        middle = _filler(length - 8)
        yield [(task.parse(f"({a}+({middle}+{b}))"), (a + b + 1) % MODULUS) for a in digits for b in digits]


def _solve_equation(task: Task, length: int) -> Iterator[Witness]:
    """Yield equations for the summand to a digit at the start, with the sum after the equals sign."""
    if length >= 11:
        digits = range(MODULUS)
        middle = _filler(length - 10)
        yield [(task.parse(f"({a}+({middle}+x))={v}"), (v - a + 1) % MODULUS) for a in digits for v in digits]


WITNESSES: dict[str, Callable[[Task, int], Iterator[Witness]]] = {
    "parity": _parity,
    "even-pairs": _even_pairs,
    "missing-duplicate": _missing_duplicate,
    "stack-manipulation": _stack_manipulation,
    "cycle-navigation": _cycle_navigation,
    "modular-arithmetic": _modular_arithmetic,
    "solve-equation": _solve_equation,
}

SHORT = 128  # number of tokens up to which masked matrices are used
_FEW = 12  # number of keys up to which the largest scores are found by repeated maxima

# context in which an encoder's own generator draws
Drawing = Callable[[torch.device], AbstractContextManager[None]]
Attend = Callable[[Tensor, Tensor | None, Sequence[Tensor], bool], tuple[Tensor, Callable[[Tensor], Tensor]]]


def attention_by_torch(layers: Sequence[Attention], drawing: Sequence[Drawing]) -> Attend:
    """Return the encoders' attention, differentiated by torch, which draws its own drops."""

    def attend(
        qkv: Tensor, valid: Tensor | None, drops: Sequence[Tensor], training: bool
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        del drops
        leaf, n = qkv.detach().requires_grad_(training), len(layers)
        masks = [None] * n if valid is None else valid.chunk(n)
        mixed = []
        with torch.set_grad_enabled(training):
            for layer, draw, part, mask in zip(layers, drawing, leaf.chunk(n), masks, strict=True):
                with draw(qkv.device):
                    mixed.append(layer.mix(part, mask))
        return torch.cat(mixed).detach(), lambda grad: torch.autograd.grad(mixed, leaf, grad.chunk(n))[0]

    return attend


class MatrixAttention:
    """Attention of encoders with the same configuration, by masked matrices (L keys, G·B·H rows, L queries)."""

    def __init__(self, layers: Sequence[Attention], drawing: Sequence[Drawing]) -> None:
        self._layers, self._drawing = layers, drawing
        self._fixed: dict[int, Tensor] = {}  # keys that are independent of the input, by length

    def __call__(
        self, qkv: Tensor, valid: Tensor | None, drops: Sequence[Tensor], training: bool
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Mix the values."""
        layer, (rows, length, _) = self._layers[0], qkv.shape
        by_head = qkv.view(rows, length, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = by_head.reshape(3, -1, length, layer.head_width).unbind()
        scores = _by_key(k, q, layer.scale)
        if valid is not None:
            scores.masked_fill_(~valid.repeat_interleave(layer.heads, 0).T[:, :, None], -math.inf)
        of_all = None  # softmax over all keys, for straight-through gradients
        if training and layer.core.straight_through:
            of_all = torch.softmax(scores, 0).nan_to_num_(0.0)
        weights = torch.softmax(self._masked(scores, by_head, valid), 0)
        if layer.k is not None:  # a query may have no key
            weights.nan_to_num_(0.0)
        factor, flat = 1 / (1 - layer.core.p) if drops else 1.0, weights.view(-1)
        where = _places(drops, weights.shape, weights.device)
        dropped = flat.index_select(0, where)
        flat.index_fill_(0, where, 0)
        mixed = torch.empty_like(v)
        torch.baddbmm(mixed, weights.permute(1, 2, 0), v, beta=0, alpha=factor, out=mixed)

        def backward(grad: Tensor) -> Tensor:
            grad = grad.view(rows, length, layer.heads, -1).transpose(1, 2).reshape(v.shape)
            d_by_head = v.new_empty(3, *v.shape)
            d_q, d_k, d_v = d_by_head.unbind()
            torch.baddbmm(d_v, weights.transpose(0, 1), grad, beta=0, alpha=factor, out=d_v)
            d_weights = _by_key(v, grad, factor)
            d_weights.view(-1).index_fill_(0, where, 0)
            flat.index_copy_(0, where, dropped)
            softmax = weights if of_all is None else of_all
            d_scores: Tensor = torch._softmax_backward_data(d_weights, softmax, 0, weights.dtype)
            torch.baddbmm(d_q, d_scores.permute(1, 2, 0), k, beta=0, alpha=layer.scale, out=d_q)
            torch.baddbmm(d_k, d_scores.transpose(0, 1), q, beta=0, alpha=layer.scale, out=d_k)
            return d_by_head.view(by_head.shape).permute(1, 3, 0, 2, 4).reshape(qkv.shape)

        return mixed.view(rows, -1, length, layer.head_width).transpose(1, 2).reshape(rows, length, -1), backward

    def _masked(self, scores: Tensor, by_head: Tensor, valid: Tensor | None) -> Tensor:
        """Replace the scores of keys that a query does not attend to by -∞."""
        layer, length = self._layers[0], len(scores)
        keeps = ATTENTIONS[layer.kind].keeps
        if layer.k is None:
            return scores
        if keeps in ("largest", "smallest"):
            k, counts = min(layer.k, length), scores.new_tensor([length]) if valid is None else valid.sum(1)
            wanted = int((counts.clamp(max=k) + length - counts).sum()) * (scores[0].numel() // len(counts))
            if keeps == "largest":
                return largest(scores, k, wanted)
            kept = largest(torch.where(scores == -math.inf, scores, -scores), k, wanted)
            return torch.where(kept == -math.inf, kept, scores)
        if keeps == "fixed" and valid is None:  # the same for every sample and step
            if length not in self._fixed:
                self._fixed[length] = self._kept(by_head, None)[:, :1]
            kept = self._fixed[length]
        else:
            kept = self._kept(by_head, valid)
        scores.view(length, -1, layer.heads, length).masked_fill_(~kept, -math.inf)
        return scores

    def _kept(self, by_head: Tensor, valid: Tensor | None) -> Tensor:
        """Return (L keys, G·B, H, L queries) bool: the keys that the encoders' own layers select."""
        n, kept = len(self._layers), []
        masks = [None] * n if valid is None else valid.chunk(n)
        for layer, draw, (q, k, _), mask in zip(
            self._layers, self._drawing, by_head.chunk(n, 1), masks, strict=True
        ):
            with draw(q.device):
                selected = layer.select(q, k, mask)
            assert selected is not None
            length = q.shape[2]
            own = torch.zeros(*q.shape[:3], length + 1, dtype=torch.bool, device=q.device)
            own.scatter_(3, selected.masked_fill(selected < 0, length), True)
            first, last = layer.core.everywhere
            own[:, :, :first] = own[:, :, length - last :] = True
            kept.append(own[..., :length])
        return torch.cat(kept).permute(3, 0, 1, 2)


def _by_key(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Return factor · a[r] b[r]ᵀ for all rows r, in the layout (keys, rows, queries)."""
    products = a.new_empty(len(a), a.shape[1], b.shape[1])
    torch.baddbmm(products, a, b.mT, beta=0, alpha=factor, out=products)
    return products.transpose(0, 1).contiguous()


def _places(drops: Sequence[Tensor], shape: torch.Size, device: torch.device) -> Tensor:
    """Return flat positions among the weights of all encoders from positions within each."""
    if len(drops) < 2:
        return drops[0] if drops else torch.empty(0, dtype=torch.int64, device=device)
    _, rows, queries = shape
    own = rows * queries // len(drops)  # weights of a key in one encoder
    return torch.cat([d + (d // own) * (rows * queries - own) + i * own for i, d in enumerate(drops)])


def largest(scores: Tensor, k: int, wanted: int) -> Tensor:
    """Replace all scores except each query's k largest by -∞, in place."""
    if k <= _FEW:
        # Distances to the largest score; k times, the nearest is set to infinity. Only vectorised CPU operations:
        # comparisons, masks and topk take many times longer.
        distance = scores.amax(0) - scores
        for step in range(k):
            if step:
                distance.sub_(distance.amin(0))
            torch.threshold_(distance, 0.0, math.inf)
        bound = torch.threshold_(distance, torch.finfo(distance.dtype).max, -math.inf)  # ∞ if kept, else -∞
        if float(bound.clamp(0, 1).sum(0).sum(dtype=torch.float64)) == wanted:
            return torch.minimum(scores, bound, out=scores)
    # Equal scores (or many keys): torch decides which of them are kept.
    forbidden = torch.ones_like(scores, dtype=torch.bool).scatter_(0, scores.topk(k, 0).indices, False)
    return scores.masked_fill_(forbidden, -math.inf)
