"""Data and random states of a run, and hand-derived training steps for one encoder or several of the same size."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models.attention import selection as products
from semdiag_models.attention.attention import SHORT, MatrixAttention, attention_by_torch
from semdiag_models.attention.dense_attention import dropped_positions
from semdiag_models.config import TrainingConfig
from semdiag_models.encoder import ACTIVATION_FUNCTIONS, Encoder, mean
from semdiag_models.optimization import FlatParameters
from semdiag_models.reading import InputError
from semdiag_models.tasks import task_of


class Split(NamedTuple):
    """Labelled samples: tokens (N, L) int64 and labels (N,) int64."""

    tokens: Tensor
    labels: Tensor


def draw_data(config: TrainingConfig, padded_length: int, pad_id: int) -> tuple[Split, Split]:
    """Regenerate a run's training and held-out samples from its seed."""
    generator = torch.Generator().manual_seed(config.seed)
    train, holdout = _draw(config, config.holdout_samples, generator, pad_id)
    return _padded(*train, padded_length, pad_id), _padded(*holdout, padded_length, pad_id)


def draw_fresh(config: TrainingConfig, epoch: int, padded_length: int, pad_id: int) -> Split:
    """Draw an epoch's training samples from seed and epoch alone, so that a resumed run sees the same ones."""
    if epoch == 0:
        return draw_data(config, padded_length, pad_id)[0]
    words = np.random.SeedSequence([config.seed, epoch]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
    train, _ = _draw(config, 1, generator, pad_id)
    return _padded(*train, padded_length, pad_id)


def _draw(config: TrainingConfig, holdout: int, generator: torch.Generator, pad_id: int) -> tuple[Split, Split]:
    """Draw training samples and this many held-out ones, padded to the longest if lengths are drawn."""
    task = task_of(config)
    if config.least_length is None:
        first, second = task.draw(config.train_samples, holdout, config.length, generator)
        return Split(*first), Split(*second)
    total = config.train_samples + holdout
    lengths = torch.randint(config.least_length, config.length + 1, (total,), generator=generator)
    tokens = torch.full((total, config.length), pad_id)
    labels = torch.empty(total, dtype=torch.int64)
    for length in sorted(set(lengths.tolist())):
        rows = (lengths == length).nonzero().flatten()
        (drawn, theirs), _ = task.draw(len(rows), 1, length, generator)
        tokens[rows, :length], labels[rows] = drawn, theirs
    n = config.train_samples
    return Split(tokens[:n], labels[:n]), Split(tokens[n:], labels[n:])


def _padded(tokens: Tensor, labels: Tensor, length: int, pad_id: int) -> Split:
    return Split(F.pad(tokens, (0, length - tokens.shape[1]), value=pad_id), labels)


RandomState = dict[str, Tensor]  # generator state by kind of device


def random_state(device: torch.device) -> RandomState:
    """Return the states of the CPU's and the device's global generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_random_state(states: RandomState) -> None:
    """Restore the global generators of the available devices."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def drawing_from(states: list[RandomState] | None, part: int, device: torch.device) -> Iterator[None]:
    """Draw, in the context, from one of several states, which advances; the global generators are restored."""
    if states is None:
        yield
        return
    before = random_state(device)
    restore_random_state(states[part])
    try:
        yield
        states[part] = random_state(device)
    finally:
        restore_random_state(before)


Backward = Callable[[Tensor], Tensor]
Operation = Callable[[Tensor], tuple[Tensor, Backward]]

ALIKE = (  # fields that determine sizes, and everything but attention
    *("vocabulary_size", "classes", "length", "blocks", "width", "mlp_width", "heads", "head_width", "activation"),
    *("dropout", "first_norm_eps", "pad_as_token", "global_tokens", "norm", "pooling"),
)
_ACTIVATION_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "mish": torch.ops.aten.mish_backward,
}


class Stack(FlatParameters):
    """Encoders of the same size with their parameters in one buffer, a row per encoder."""

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
        self.config = c = first.config
        self._states = states
        self._short = c.length + c.extra_tokens <= SHORT  # else attention draws its own drops
        self._drops: dict[str, Tensor] = {}  # flat positions among the elements of all encoders, by place
        # positions among an encoder's attention weights, by block and encoder
        self._weight_drops: list[list[Tensor]] = []
        self._table, self._d_table = self.views("embedding.weight")
        blocks = [operation for i in range(c.blocks) for operation in self._block(i)]
        self._network = self._chain(self._drop("embedded"), *blocks, self._pool, self._linear("head"))
        # Freeing 32 MB makes glibc keep up to 64 MB of what a step frees for the next one: a tenth of the time.
        torch.empty(2**25 - 2**14, dtype=torch.uint8)

    def logits(self, tokens: Tensor, padded: bool | None = None) -> Tensor:
        """Classify without dropout, like :meth:`Encoder.forward` in evaluation mode."""
        with self._undifferentiated():
            return self._run(tokens, padded, training=False)[0]

    def differentiate(self, tokens: Tensor, labels: Tensor, padded: bool | None = None) -> Tensor:
        """Compute each encoder's mean cross-entropy, with dropout, and store its gradient in ``gradients``."""
        with self._undifferentiated():
            logits, backward = self._run(tokens, padded, training=True)
            log_p = logits.log_softmax(-1)
            backward(log_p.exp().sub_(F.one_hot(labels, log_p.shape[-1])).div_(labels.shape[1]))
            return -log_p.gather(-1, labels[..., None]).mean((1, 2))

    def _undifferentiated(self) -> AbstractContextManager[object]:
        """Turn autograd off in the context, and also its bookkeeping if no part of the step needs it."""
        return torch.inference_mode() if self._short else torch.no_grad()

    def _run(self, tokens: Tensor, padded: bool | None, *, training: bool) -> tuple[Tensor, Backward]:
        """Return logits (S, B, classes), and the function that differentiates all parameters."""
        first, (stack, batch, given) = self.encoders[0], tokens.shape
        for encoder in self.encoders:
            if encoder.training != training:
                encoder.train(training)
        flat = tokens.flatten(0, 1)
        ids, self._valid = first.sequence(flat), first.valid(flat, padded)
        self._training, self._length = training, ids.shape[1]
        self._lead = () if stack == 1 else (stack,)
        self._draw(batch * self._length if training and self.config.dropout > 0 else 0)
        x, store = self._embed(ids, first.positions_of(given))
        y, backward = self._network(x)
        return y.view(stack, batch, -1), lambda grad: store(backward(grad.view(y.shape)))

    def _block(self, i: int) -> list[Operation]:
        """Return block i's operations."""
        first, second = (partial(_norm, eps=eps) for eps in (self.config.first_norm_eps if i == 0 else 1e-5, 1e-5))
        qkv, out, expand, contract = (
            self._linear(f"blocks.{i}.{name}") for name in ("attention.qkv", "attention.out", "expand", "contract")
        )
        attended, hidden, mixed = (self._drop(f"{place} {i}") for place in ("attended", "hidden", "mlp"))
        attention, mlp = (
            [qkv, self._attention(i), out, attended],
            [expand, hidden, self._activate, contract, mixed],
        )
        if self.config.norm == "pre":
            return [self._residual(first, *attention), self._residual(second, *mlp)]
        return [self._residual(*attention), first, self._residual(*mlp), second]

    def _chain(self, *operations: Operation) -> Operation:
        """Return several operations as one."""

        def chain(x: Tensor) -> tuple[Tensor, Backward]:
            steps: list[Backward] = []
            for operation in operations:
                x, step = operation(x)
                if self._training:  # else the memory of its saved tensors is freed
                    steps.append(step)

            def backward(grad: Tensor) -> Tensor:
                while steps:
                    grad = steps.pop()(grad)
                return grad

            return x, backward

        return chain

    def _residual(self, *operations: Operation) -> Operation:
        """Return x + f(x), f of several operations; the gradient of its input is in new memory."""
        branch = self._chain(*operations)

        def residual(x: Tensor) -> tuple[Tensor, Backward]:
            y, backward = branch(x)
            return y.add_(x), lambda grad: backward(grad).add_(grad)

        return residual

    def _linear(self, name: str) -> Operation:
        """Return the layer x Wᵀ + b."""
        (weight, d_weight), (bias, d_bias) = (self.views(f"{name}.{part}") for part in ("weight", "bias"))
        row, several = bias.unsqueeze(-2), weight.ndim == 3
        product: Callable[..., Tensor] = torch.baddbmm if several else torch.addmm

        def linear(x: Tensor) -> tuple[Tensor, Backward]:
            by_onednn = products.takes(x, weight)
            y = products.linear(x, weight, bias) if by_onednn else torch.matmul(x, weight.mT).add_(row)

            def backward(grad: Tensor) -> Tensor:
                product(d_weight, grad.mT, x, beta=0, out=d_weight)
                torch.sum(grad, -2, out=d_bias)
                return products.linear(grad, weight.mT) if products.takes(grad, weight.mT) else grad @ weight

            return y, backward

        return linear

    def _attention(self, i: int) -> Operation:
        """Return block i's attention, from queries, keys and values side by side to mixed values."""
        encoders, states = self.encoders, self._states
        # Neighbours with the same attention are computed together.
        groups = [list(group) for _, group in groupby(range(len(encoders)), lambda e: encoders[e].config)]
        attend = MatrixAttention if self._short else attention_by_torch
        members = [
            attend([encoders[e].attention(i) for e in group], [partial(drawing_from, states, e) for e in group])
            for group in groups
        ]

        def attention(qkv: Tensor) -> tuple[Tensor, Backward]:
            by_sample = qkv.view(-1, self._length, qkv.shape[-1])
            sizes = [len(group) * len(by_sample) // len(encoders) for group in groups]
            masks = [None] * len(sizes) if self._valid is None else _split(self._valid, sizes)
            drops = self._weight_drops[i] if self._weight_drops else None
            own = [[drops[e] for e in group] if drops else [] for group in groups]
            samples = zip(members, _split(by_sample, sizes), masks, own, strict=True)
            outputs = [member(part, mask, drop, self._training) for member, part, mask, drop in samples]

            def backward(grad: Tensor) -> Tensor:
                grads = _split(grad.view(-1, self._length, grad.shape[-1]), sizes)
                back = [step(part) for (_, step), part in zip(outputs, grads, strict=True)]
                return _joined(back).view(qkv.shape)

            return _joined([mixed for mixed, _ in outputs]).reshape(*qkv.shape[:-1], -1), backward

        return attention

    def _activate(self, x: Tensor) -> tuple[Tensor, Backward]:
        """Apply the activation; the gradient of ReLU follows from its output."""
        name = self.config.activation
        y = x.relu_() if name == "relu" else ACTIVATION_FUNCTIONS[name](x)
        return y, lambda grad: _ACTIVATION_BACKWARD[name](grad, x)

    def _drop(self, place: str) -> Operation:
        """Return dropout of all elements at a place: x / (1 - p), with zeros where the step drops."""

        def drop(x: Tensor, out: Tensor | None = None) -> Tensor:
            y = torch.mul(x, 1 / (1 - self.config.dropout), out=out)
            y.view(-1).index_fill_(0, self._drops[place], 0)
            return y

        return lambda x: (drop(x, out=x), drop) if place in self._drops else (x, lambda grad: grad)

    def _draw(self, rows: int) -> None:
        """Draw all elements that a step drops."""
        self._drops, self._weight_drops = {}, []
        if rows == 0:
            return
        c, device = self.config, self.parameters.device
        sizes = {"embedded": rows * c.width}
        for i in range(c.blocks):
            own = {"attended": rows * c.width, "hidden": rows * c.mlp_width, "mlp": rows * c.width}
            sizes |= {f"{place} {i}": size for place, size in own.items()}
        weights = [rows * c.heads * self._length] * (c.blocks if self._short else 0)  # last in the order
        ends = list(accumulate([*sizes.values(), *weights]))
        by_encoder = []
        for e in range(len(self.encoders)):
            with drawing_from(self._states, e, device):
                positions = dropped_positions(ends[-1], c.dropout)
            parts = positions.tensor_split(torch.searchsorted(positions, torch.tensor(ends[:-1])).tolist())
            starts = zip(parts, [0, *ends[:-1]], strict=True)
            by_encoder.append([part.sub_(start).to(device) for part, start in starts])
        by_place = list(zip(*by_encoder, strict=True))
        for (place, size), parts in zip(sizes.items(), by_place, strict=False):
            self._drops[place] = _joined([part.add_(e * size) for e, part in enumerate(parts)])
        self._weight_drops = [list(parts) for parts in by_place[len(sizes) :]]

    def _embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Backward]:
        """Return scaled embeddings plus positions, and the function that stores the gradient of the table."""
        width, vocabulary = self.config.width, self._table.shape[-2]
        own = torch.arange(0, len(self.encoders) * vocabulary, vocabulary, device=ids.device)
        rows = (ids.view(len(own), -1) + own[:, None]).flatten()  # in the concatenated tables of all encoders
        x = (self._table * math.sqrt(width)).view(-1, width)[rows].view(*ids.shape, width).add_(positions)

        def backward(grad: Tensor) -> Tensor:
            d_table = torch.ops.aten.embedding_dense_backward(
                grad.view(-1, width), rows, len(own) * vocabulary, -1, False
            )
            return torch.mul(d_table.view_as(self._table), math.sqrt(width), out=self._d_table)

        return x.view(*self._lead, -1, width), backward

    def _pool(self, x: Tensor) -> tuple[Tensor, Backward]:
        """Return the first tokens, or the mean over the valid ones."""
        by_token, valid = x.view(-1, self._length, x.shape[-1]), self._valid
        pooled = by_token[:, 0] if self.config.cls_tokens else mean(by_token, valid)

        def backward(grad: Tensor) -> Tensor:
            grad = grad.view(-1, 1, grad.shape[-1])
            if self.config.cls_tokens:
                return F.pad(grad, (0, 0, 0, self._length - 1)).view_as(x)
            if valid is None:
                return (grad / self._length).expand_as(by_token).reshape(x.shape)
            return (grad / valid.sum(1)[:, None, None] * valid[:, :, None]).view_as(x)

        return pooled.reshape(*self._lead, -1, x.shape[-1]), backward


def _norm(x: Tensor, eps: float) -> tuple[Tensor, Backward]:
    """Return rows of mean 0 and variance 1, in fewer passes than torch's kernel takes at small widths."""
    y = x - x.mean(-1, keepdim=True)
    scale = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y.mul_(scale)

    def backward(grad: Tensor) -> Tensor:
        shift, unit = torch.zeros_like(scale), torch.ones_like(scale)
        d_y: Tensor = torch.ops.aten.native_layer_norm_backward(
            grad, y, y.shape[-1:], shift, unit, None, None, [True, False, False]
        )[0]
        return d_y.mul_(scale)

    return y, backward


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [x] if len(sizes) == 1 else list(torch.split(x, sizes))
