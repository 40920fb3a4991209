"""Hand-derived loss and gradients of a training step, for one encoder or several of the same size at once.

:class:`Encoder` defines what the network computes, and torch can differentiate it. Here the same loss and
gradients take fewer passes over memory: parameters and gradients are flat buffers, matrix products write directly
to their destination, biases, residual branches and dropout factors are fused into them, and the dropped elements
of all places are drawn at once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models.encoder import ACTIVATION_FUNCTIONS, Encoder, mean
from semdiag_models.errors import InputError
from semdiag_models.random_state import RandomState
from semdiag_models.step.attention import SHORT, LongAttention, Members, ShortAttention
from semdiag_models.step.dropout import Drops, Place
from semdiag_models.step.flat_parameters import FlatParameters
from semdiag_models.step.linear import Linear

_Attention = ShortAttention | LongAttention
ALIKE = (  # fields that determine sizes and everything but attention
    *("vocabulary_size", "classes", "length", "blocks", "width", "mlp_width", "heads", "head_width", "activation"),
    *("dropout", "first_norm_eps", "pad_as_token", "global_tokens", "norm", "pooling"),
)
_ACTIVATION_BACKWARD: dict[
    str, Callable[[Tensor, Tensor], Tensor]
] = {  # functions of the output's gradient and the input
    "relu": lambda grad, x: torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad),
    "gelu": torch.ops.aten.gelu_backward,
    "mish": torch.ops.aten.mish_backward,
}


class Stack(FlatParameters):
    """Encoders of the same size with their parameters in one buffer, a row per encoder.

    Source of the gradients: the chain rule; tests compare them with torch's in float64.

    Args:
        encoders: equal in everything but attention (kind, k, seed, temperature) and parameter values.
        states: of the random generators, one per encoder, advanced by draws; None means the global ones.

    Raises:
        InputError: if the encoders differ in more than attention.
    """

    def __init__(self, encoders: Sequence[Encoder], states: list[RandomState] | None = None) -> None:
        first = encoders[0]
        for field in ALIKE:
            values = {getattr(encoder.config, field) for encoder in encoders}
            if len(values) > 1:
                raise InputError(
                    f"Models trained at once must be equal in all but their attention. Got {field} of "
                    f"{' and '.join(sorted(map(str, values)))}: train them one by one."
                )
        if not first.config.cls_as_key:
            raise InputError("A model with cls_as_key=False, as the paper's code has, cannot be trained here.")
        super().__init__(encoders)
        self.config, self._states = first.config, states
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._shaped: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}  # views of kept memory
        self._head = Linear(self, "head")
        self._table, self._d_table = self.views("embedding.weight")
        blocks = range(self.config.blocks)
        self._qkv = [Linear(self, "attention.qkv", i, parts=3) for i in blocks]
        self._out, self._expand, self._contract = (
            [Linear(self, name, i) for i in blocks] for name in ("attention.out", "expand", "contract")
        )
        short = self.config.length + self.config.extra_tokens <= SHORT
        kind = ShortAttention if short else LongAttention
        # Neighbours with the same attention are computed together: slices of the stack, their attention by layer.
        alike = [list(group) for _, group in groupby(range(len(encoders)), key=lambda i: encoders[i].config)]
        self._groups = [slice(group[0], group[-1] + 1) for group in alike]
        self._attention = [
            [
                kind(Members([e.attention(i) for e in encoders[g]], states, g.start, i, self.memory))
                for g in self._groups
            ]
            for i in blocks
        ]
        self._draws_weights = short  # else attention draws its own drops
        self._saved: dict[tuple[str, int], tuple[Tensor, ...]] = {}  # from the forward pass

    def logits(self, tokens: Tensor, padded: bool | None = None) -> Tensor:
        """Classify without dropout, as :meth:`Encoder.forward` does in evaluation mode.

        Args:
            tokens: (S, B, L) int64 token ids, one batch per encoder.
            padded: whether PAD may occur among them; None checks.

        Returns:
            Logits (S, B, classes).
        """
        with self._undifferentiated():
            return self._forward(tokens, padded, training=False).clone()  # the memory is reused

    def differentiate(self, tokens: Tensor, labels: Tensor, padded: bool | None = None) -> Tensor:
        """Compute each encoder's mean cross-entropy, with dropout, and store its gradient in ``gradients``.

        Args:
            tokens: (S, B, L) int64 token ids, one batch per encoder.
            labels: (S, B) int64.
            padded: whether PAD may occur among the tokens; None checks.

        Returns:
            Losses in nats, (S,).
        """
        with self._undifferentiated():
            log_p = self._forward(tokens, padded, training=True).log_softmax(-1)
            d_logits = log_p.exp().sub_(F.one_hot(labels, log_p.shape[-1])).div_(labels.shape[1])
            self._backward(d_logits)
            return -log_p.gather(-1, labels[..., None]).mean((1, 2))

    def _undifferentiated(self) -> AbstractContextManager[object]:
        """Turn autograd off, inside, and also its bookkeeping if no part of the step needs it."""
        return torch.inference_mode() if self._draws_weights else torch.no_grad()

    def _forward(self, tokens: Tensor, padded: bool | None, *, training: bool) -> Tensor:
        c, first, (stack, batch, given) = self.config, self.encoders[0], tokens.shape
        for encoder in self.encoders:
            if encoder.training != training:
                encoder.train(training)
        flat = tokens.flatten(0, 1)
        self._ids, self._valid = first.sequence(flat), first.valid(flat, padded)
        self._batch, self._length = batch, self._ids.shape[1]
        self._rows = (batch * self._length,) if stack == 1 else (stack, batch * self._length)
        self._training, p = training, c.dropout if training else 0.0
        self._drops = self._draw(p)
        x = self._embed(first.positions_of(given))
        for i in range(c.blocks):
            eps = c.first_norm_eps if i == 0 else 1e-5
            if c.norm == "pre":  # the residual stream is not needed again; update it in place
                x.add_(self._attend(i, self._norm(x, "attention", i, eps)))
                x.add_(self._mlp(i, self._norm(x, "mlp", i)))
            else:
                x = self._norm(self._attend(i, x).add_(x), "attention", i, eps)
                x = self._norm(self._mlp(i, x).add_(x), "mlp", i)
        x = x.view(stack * batch, self._length, c.width)
        self._pooled = (x[:, 0] if c.cls_tokens else mean(x, self._valid)).reshape(*self._lead, batch, c.width)
        return self._head.forward(self._pooled).view(stack, batch, c.classes)

    def _backward(self, d_logits: Tensor) -> None:
        c = self.config
        d_pooled = self._head.backward(self._pooled, d_logits.view(*self._lead, *d_logits.shape[1:]))
        d_pooled = d_pooled.view(-1, 1, c.width)
        grad = self.memory("gradient", (*self._rows, c.width))  # of the residual stream, from here downwards
        by_token = grad.view(-1, self._length, c.width)
        if c.cls_tokens:
            by_token.zero_()[:, :1] = d_pooled
        elif self._valid is None:
            by_token.copy_(d_pooled.div_(self._length))
        else:
            torch.mul(d_pooled / self._valid.sum(1)[:, None, None], self._valid[:, :, None], out=by_token)
        for i in reversed(range(c.blocks)):
            if c.norm == "pre":
                grad.add_(self._norm_backward(self._mlp_backward(i, grad), "mlp", i))
                grad.add_(self._norm_backward(self._attend_backward(i, grad), "attention", i))
            else:
                grad = self._norm_backward(grad, "mlp", i)
                grad = self._norm_backward(grad.add_(self._mlp_backward(i, grad)), "attention", i)
                grad.add_(self._attend_backward(i, grad))
        self._embed_backward(grad)

    @property
    def _lead(self) -> tuple[int, ...]:
        """Leading dimensions of matrices: none for a single encoder."""
        return self._rows[:-1]

    def memory(self, name: str, shape: tuple[int, ...], layer: int = 0) -> Tensor:
        """Return uninitialised memory, reused in the next step; outside training also in the next layer."""
        key = (name, layer * self._training)
        view = self._shaped.get((*key, shape))
        if view is None:
            kept, size = self._kept.get(key), math.prod(shape)
            if kept is None or len(kept) < size:
                kept = self._kept[key] = self.parameters.new_empty(size)
                self._shaped = {of: v for of, v in self._shaped.items() if of[:2] != key}
            view = self._shaped[*key, shape] = kept[:size].view(*shape)
        return view

    def _draw(self, p: float) -> Drops:
        """Draw all dropped elements of a step."""
        c, rows = self.config, self._batch * self._length
        sizes: dict[Place, int] = {("embedded", 0): rows * c.width}
        for i in range(c.blocks):
            sizes |= {
                ("attended", i): rows * c.width,
                ("hidden", i): rows * c.mlp_width,
                ("mlp", i): rows * c.width,
            }
        weights = [rows * c.heads * self._length] * c.blocks if self._draws_weights else []
        return Drops(p, sizes, weights, self._states, len(self.encoders), self.parameters.device)

    def _embed(self, positions: Tensor) -> Tensor:
        width = self.config.width
        x = self.memory("embedded", (self._ids.numel(), width))
        scaled = (self._table * math.sqrt(width)).view(-1, width)
        torch.index_select(scaled, 0, self._table_rows(), out=x)
        x.view(-1, self._length, width).add_(positions)
        return self._drops.drop(x.view(*self._rows, width), ("embedded", 0))

    def _embed_backward(self, grad: Tensor) -> None:
        table, width = self._table, self.config.width
        grad = self._drops.drop(grad, ("embedded", 0)).view(-1, width)
        d_table = torch.ops.aten.embedding_dense_backward(
            grad, self._table_rows(), table.numel() // width, -1, False
        )
        torch.mul(d_table.view_as(table), math.sqrt(width), out=self._d_table)

    def _table_rows(self) -> Tensor:
        """Return the tokens' rows in the concatenated embedding tables of all encoders."""
        if self._table.ndim == 2:
            return self._ids.flatten()
        stack, vocabulary, _ = self._table.shape
        own = torch.arange(0, stack * vocabulary, vocabulary, device=self._ids.device)
        return (self._ids.view(stack, -1) + own[:, None]).flatten()

    def _norm(self, x: Tensor, name: str, i: int, eps: float = 1e-5) -> Tensor:
        """Return rows of mean 0 and variance 1, in fewer passes than torch's kernel takes at small widths."""
        y = torch.sub(x, x.mean(-1, keepdim=True), out=self.memory(f"{name} norm", x.shape, i))
        spread = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        scale = spread.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        self._saved[f"{name} norm", i] = y.mul_(scale), scale
        return y

    def _norm_backward(self, grad: Tensor, name: str, i: int) -> Tensor:
        """Return the gradient of a norm's input."""
        y, scale = self._saved[f"{name} norm", i]
        shift, unit = torch.zeros_like(scale), torch.ones_like(scale)
        d_y: Tensor = torch.ops.aten.native_layer_norm_backward(
            grad, y, y.shape[-1:], shift, unit, None, None, [True, False, False]
        )[0]
        return d_y.mul_(scale)

    def _attend(self, i: int, x: Tensor) -> Tensor:
        """Return Dropout(attention(x))."""
        qkv = self._qkv[i].forward(x)
        parts = []
        for attention, members, (part,) in self._by_group(i, qkv):
            valid = None if self._valid is None else self._valid[self._samples(members)]
            drops = self._drops.weights[i][members] if self._drops.weights else ()
            parts.append(attention.forward(part, valid, self._training, drops))
        mixed = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(*self._rows, -1)
        self._saved["attention", i] = x, mixed
        return self._drops.drop(self._out[i].forward(mixed), ("attended", i))

    def _attend_backward(self, i: int, grad: Tensor) -> Tensor:
        x, mixed = self._saved["attention", i]
        d_mixed = self._out[i].backward(mixed, self._dropped(grad, ("attended", i)))
        d_q, d_k, d_v = self.memory("d qkv", (3, *mixed.shape)).unbind()
        for attention, _, (part, *out) in self._by_group(i, d_mixed, d_q, d_k, d_v):
            attention.backward(part, *out)
        return self._qkv[i].backward(x, d_q, d_k, d_v)

    def _samples(self, members: slice) -> slice:
        return slice(members.start * self._batch, members.stop * self._batch)

    def _by_group(self, i: int, *tensors: Tensor) -> Iterator[tuple[_Attention, slice, list[Tensor]]]:
        """Yield layer i's attention, the slice of its encoders, and their samples of the tensors, (G·B, L, …)."""
        by_sample = [t.view(-1, self._length, t.shape[-1]) for t in tensors]
        if len(self._groups) == 1:
            yield self._attention[i][0], self._groups[0], by_sample
            return
        for attention, members in zip(self._attention[i], self._groups, strict=True):
            samples = self._samples(members)
            yield attention, members, [t[samples] for t in by_sample]

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        """Return Dropout(mlp(x))."""
        before = self._drops.drop(self._expand[i].forward(x), ("hidden", i))
        relu = self.config.activation == "relu"  # its gradient follows from its output
        hidden = before.relu_() if relu else ACTIVATION_FUNCTIONS[self.config.activation](before)
        self._saved["mlp", i] = x, before, hidden
        return self._drops.drop(self._contract[i].forward(hidden), ("mlp", i))

    def _mlp_backward(self, i: int, grad: Tensor) -> Tensor:
        x, before, hidden = self._saved["mlp", i]
        d_hidden = self._contract[i].backward(hidden, self._dropped(grad, ("mlp", i)))
        d_before = _ACTIVATION_BACKWARD[self.config.activation](d_hidden, before)
        return self._expand[i].backward(x, self._drops.drop(d_before, ("hidden", i)))

    def _dropped(self, grad: Tensor, place: Place) -> Tensor:
        """Return the gradient before dropout in new memory: that of the residual stream stays unchanged."""
        return self._drops.drop(grad, place, self.memory("dropped", grad.shape))
