"""Attention in the trainer's step: forward, and backward from the gradient of its output.

Short sequences use masked matrices, which are kept for the backward pass: at such lengths a dense product is
cheaper than gathering keys. The layout is (keys, rows, queries), so that the softmax and the search for each
query's k largest scores run along memory. Longer sequences use the encoder's own attention, which never holds a
length × length tensor, and torch's autograd for it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag_models.attention.kinds import ATTENTIONS
from semdiag_models.encoder import Attention
from semdiag_models.random_state import RandomState, drawing_from

SHORT = 128  # up to so many tokens, masked matrices are used
_FEW = 12  # up to so many keys, the largest scores are found by repeated maxima


@dataclass
class Members:
    """Encoders with the same configuration of attention, computed together.

    Attributes:
        layers: the attention layer of each.
        states: of the random generators of the whole stack, advanced by draws; None means the global ones.
        first: position of the first of these encoders among the states.
        block: number of the layers' block.
        memory: of the stack, by name, shape and layer.
    """

    layers: Sequence[Attention]
    states: list[RandomState] | None
    first: int
    block: int
    memory: Callable[[str, tuple[int, ...], int], Tensor]

    def drawing(self, i: int, device: torch.device) -> AbstractContextManager[None]:
        """Draw, inside, from the state of the i-th of them."""
        return drawing_from(self.states, self.first + i, device)

    def kept(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return memory for these encoders and this block, in use until the backward pass."""
        return self.memory(f"{name} {self.first}", shape, self.block)

    def scratch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return memory shared by all blocks, so that it stays in the CPU cache."""
        return self.memory(name, shape, 0)


class LongAttention:
    """The encoder's attention, differentiated by torch; it draws its own drops."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._mixed: list[tuple[Tensor, Tensor]] = []  # q, k and v, and their result

    def forward(self, qkv: Tensor, valid: Tensor | None, training: bool, drops: Sequence[Tensor] = ()) -> Tensor:
        """Mix the values.

        Args:
            qkv: (G·B, L, 3·H·D), the encoders' batches one after another.
            valid: (G·B, L) bool, false for PAD; None if there is none.
            training: whether :meth:`backward` follows.
            drops: none.

        Returns:
            (G·B, L, H·D).
        """
        del drops
        layers, self._mixed = self._members.layers, []
        n = len(layers)
        parts = zip(layers, qkv.chunk(n), [None] * n if valid is None else valid.chunk(n), strict=True)
        for i, (layer, part, counts) in enumerate(parts):
            leaf = part.detach().requires_grad_(training)
            with torch.set_grad_enabled(training), self._members.drawing(i, qkv.device):
                self._mixed.append((leaf, layer.mix(leaf, counts)))
        outputs = [mixed.detach() for _, mixed in self._mixed]
        return outputs[0] if n == 1 else torch.cat(outputs)

    def backward(self, grad: Tensor, *d_qkv: Tensor) -> None:
        """Write the gradients of q, k and v, from that of the mixed values.

        Args:
            grad: (G·B, L, H·D).
            d_qkv: three of this shape.
        """
        leaves, mixed = zip(*self._mixed, strict=True)
        d_leaves = torch.autograd.grad(mixed, leaves, grad.chunk(len(mixed)))
        for d, part in zip(d_qkv, torch.cat(d_leaves).chunk(3, -1), strict=True):
            d.copy_(part)
        self._mixed = []


class ShortAttention:
    """Attention through masked matrices (L keys, G·B·H rows, L queries)."""

    def __init__(self, members: Members) -> None:
        self._members, self._layer = members, members.layers[0]
        self._fixed: dict[int, Tensor] = {}  # by length: keys that are independent of the input
        self._saved: tuple[Tensor, ...] = ()
        self._drops: tuple[Tensor, Tensor] | None = None
        self._of_all: Tensor | None = None  # the softmax over all keys, for straight-through gradients

    def forward(self, qkv: Tensor, valid: Tensor | None, training: bool, drops: Sequence[Tensor] = ()) -> Tensor:
        """Mix the values, like :meth:`LongAttention.forward`.

        Args:
            qkv: (G·B, L, 3·H·D).
            valid: (G·B, L) bool, or None.
            training: whether :meth:`backward` follows.
            drops: of each of the G encoders, which of its L·B·H·L weights to drop; empty if none.

        Returns:
            (G·B, L, H·D).
        """
        layer, (rows, length, _) = self._layer, qkv.shape
        if layer.heads == 1:
            q, k, v = qkv.view(rows, length, 3, -1).unbind(2)
        else:
            q, k, v = (t.reshape(-1, length, layer.head_width) for t in self._by_head(qkv))
        scores = self._masked(self._by_key(k, q, layer.scale), qkv, valid)
        weights = torch.softmax(scores, 0, out=self._members.kept("weights", tuple(scores.shape)))
        if layer.k is not None:  # a query without a key
            weights.nan_to_num_(0.0)
        factor, self._drops = 1.0, None
        if drops:
            factor = 1 / (1 - layer.core.p)
            where, flat = self._places(drops, weights.shape), weights.view(-1)
            self._drops = where, flat.index_select(0, where)
            flat.index_fill_(0, where, 0)
        mixed = self._members.kept("mixed", tuple(v.shape))
        torch.baddbmm(mixed, weights.permute(1, 2, 0), v, beta=0, alpha=factor, out=mixed)
        self._saved = (q, k, v, weights) if training else ()
        if layer.heads == 1:
            return mixed
        return mixed.view(rows, -1, length, layer.head_width).transpose(1, 2).reshape(rows, length, -1)

    def backward(self, grad: Tensor, *d_qkv: Tensor) -> None:
        """Write the gradients, like :meth:`LongAttention.backward`."""
        (q, k, v, weights), layer, self._saved = self._saved, self._layer, ()
        alone = layer.heads == 1
        if not alone:
            grad = self._heads_first(grad).reshape(q.shape)
        factor = 1 / (1 - layer.core.p) if self._drops else 1.0
        d_weights = self._by_key(v, grad, factor)
        d_q, d_k, d_v = d_qkv if alone else q.new_empty(3, *q.shape)
        torch.baddbmm(d_v, weights.transpose(0, 1), grad, beta=0, alpha=factor, out=d_v)
        if self._drops:
            where, kept = self._drops
            d_weights.view(-1).index_fill_(0, where, 0)
            weights.view(-1).index_copy_(0, where, kept)
        d_scores = self._members.scratch("by row", tuple(weights.shape))  # its content has been rearranged by key
        of_all = weights if self._of_all is None else self._of_all
        torch._softmax_backward_data(d_weights, of_all, 0, weights.dtype, grad_input=d_scores)
        torch.baddbmm(d_q, d_scores.permute(1, 2, 0), k, beta=0, alpha=layer.scale, out=d_q)
        torch.baddbmm(d_k, d_scores.transpose(0, 1), q, beta=0, alpha=layer.scale, out=d_k)
        if not alone:
            for d, by_head in zip(d_qkv, (d_q, d_k, d_v), strict=True):
                to = self._heads_first(d)
                to.copy_(by_head.view(to.shape))

    def _heads_first(self, x: Tensor) -> Tensor:
        """Return (G·B, L, H·D) as (G·B, H, L, D)."""
        return x.view(*x.shape[:2], self._layer.heads, -1).transpose(1, 2)

    def _by_key(self, a: Tensor, b: Tensor, factor: float) -> Tensor:
        """Return factor · a[r] b[r]ᵀ for all rows r, in the layout (keys, rows, queries)."""
        (rows, keys, _), queries = a.shape, b.shape[1]
        products = self._members.scratch("by row", (rows, keys, queries))
        torch.baddbmm(products, a, b.mT, beta=0, alpha=factor, out=products)
        return self._members.scratch("by key", (keys, rows, queries)).copy_(products.transpose(0, 1))

    def _by_head(self, qkv: Tensor) -> Tensor:
        """Return q, k and v as (3, G·B, H, L, D)."""
        layer = self._layer
        return qkv.view(*qkv.shape[:2], 3, layer.heads, layer.head_width).permute(2, 0, 3, 1, 4)

    def _places(self, drops: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """Return flat positions among the weights of all encoders, from positions within each."""
        if len(drops) == 1:
            return drops[0]
        _, rows, queries = shape
        own = rows * queries // len(drops)  # weights of a key in one encoder
        places = [d + (d // own) * (rows * queries - own) + i * own for i, d in enumerate(drops)]
        return torch.cat(places)

    def _masked(self, scores: Tensor, qkv: Tensor, valid: Tensor | None) -> Tensor:
        """Replace the scores of keys that a query does not attend to by -∞."""
        layer, length = self._layer, len(scores)
        keeps = ATTENTIONS[layer.kind].keeps
        if valid is not None:
            scores.masked_fill_(~valid.repeat_interleave(layer.heads, 0).T[:, :, None], -math.inf)
        if layer.k is None:
            return scores
        if keeps in ("largest", "smallest"):
            k, counts = min(layer.k, length), scores.new_tensor([length]) if valid is None else valid.sum(1)
            wanted = int((counts.clamp(max=k) + length - counts).sum()) * (scores[0].numel() // len(counts))
            if layer.core.straight_through and layer.training:
                of_all = self._members.kept("weights of all keys", tuple(scores.shape))
                self._of_all = torch.softmax(scores, 0, out=of_all).nan_to_num_(0.0)
            if keeps == "largest":
                return _largest(scores, k, wanted, self._members.scratch)
            kept = _largest(torch.where(scores == -math.inf, scores, -scores), k, wanted, self._members.scratch)
            return torch.where(kept == -math.inf, kept, scores)
        if keeps == "fixed" and valid is None:  # the same for every sample and step
            if length not in self._fixed:
                self._fixed[length] = self._kept(qkv, None)[:, :1]
            kept = self._fixed[length]
        else:
            kept = self._kept(qkv, valid)
        scores.view(length, -1, layer.heads, length).masked_fill_(~kept, -math.inf)
        return scores

    def _kept(self, qkv: Tensor, valid: Tensor | None) -> Tensor:
        """Return (L keys, G·B, H, L queries) bool: the keys that the encoders' own layers select."""
        layers = self._members.layers
        n, kept = len(layers), []
        parts = zip(
            layers, self._by_head(qkv).chunk(n, 1), [None] * n if valid is None else valid.chunk(n), strict=True
        )
        for i, (layer, (q, k, _), counts) in enumerate(parts):
            with self._members.drawing(i, q.device):
                selected = layer.select(q, k, counts)
            assert selected is not None
            length = q.shape[2]
            mask = torch.zeros(*q.shape[:3], length + 1, dtype=torch.bool, device=q.device)
            mask.scatter_(3, selected.masked_fill(selected < 0, length), True)
            first, last = layer.core.everywhere
            mask[:, :, :first] = mask[:, :, length - last :] = True
            kept.append(mask[..., :length])
        return torch.cat(kept).permute(3, 0, 1, 2)


def _largest(scores: Tensor, k: int, wanted: int, scratch: Callable[[str, tuple[int, ...]], Tensor]) -> Tensor:
    """Replace all scores except each query's k largest by -∞, in place.

    Args:
        scores: (keys, rows, queries).
        k: keys to keep.
        wanted: number of scores that are kept or already -∞.
        scratch: returns memory by name and shape.

    Returns:
        The same memory.
    """
    if k <= _FEW:
        # Distances to the largest score; k times, the nearest is set to infinity. Only vectorised CPU operations:
        # comparisons, masks and topk take many times longer.
        distance = scratch("by row", tuple(scores.shape))
        torch.sub(scores.amax(0), scores, out=distance)
        for step in range(k):
            if step:
                distance.sub_(distance.amin(0))
            torch.threshold_(distance, 0.0, math.inf)
        bound = torch.threshold_(distance, torch.finfo(distance.dtype).max, -math.inf)  # ∞ if kept, else -∞
        kept = torch.clamp(bound, 0, 1, out=scratch("kept", tuple(scores.shape)))
        if float(kept.sum(0).sum(dtype=torch.float64)) == wanted:
            return torch.minimum(scores, bound, out=scores)
    # Equal scores (or many keys): torch decides which of them are kept.
    forbidden = torch.ones_like(scores, dtype=torch.bool).scatter_(0, scores.topk(k, 0).indices, False)
    return scores.masked_fill_(forbidden, -math.inf)
