"""Steps on CUDA as replays of a captured graph, of one model or of several at once, and a kernel for small k."""

import copy
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models.kinds import ATTENTIONS

if TYPE_CHECKING:
    from semdiag_models.model import Encoder
    from semdiag_models.train import Trainer

_WARM_UP = 3  # steps before a graph is captured: kernels are chosen and compiled in them
LARGEST_K = 16  # of the kernel
LONGEST_ROW = 8192  # of the kernel


class StackedLinear(nn.Module):
    """The linear layers of several models, whose samples follow each other; weight (G, out, in), bias (G, out)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b of each model's samples: (G·B, …, in) -> (G·B, …, out)."""
        rows = x.reshape(len(self.weight), -1, x.shape[-1])
        return torch.baddbmm(self.bias[:, None], rows, self.weight.mT).view(*x.shape[:-1], -1)


class StackedEmbedding(nn.Module):
    """The embeddings of several models, whose samples follow each other; weight (G, symbols, d)."""

    def __init__(self, layers: Sequence[nn.Embedding]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))

    def forward(self, ids: Tensor) -> Tensor:
        """Return each model's vectors of its samples: (G·B, L) -> (G·B, L, d)."""
        models, symbols, _ = self.weight.shape
        first = torch.arange(0, models * symbols, symbols, device=ids.device)
        ids = (ids.view(models, -1) + first[:, None]).view_as(ids)
        return F.embedding(ids, self.weight.flatten(0, 1))


def stacked_encoder(encoders: "Sequence[Encoder]") -> "Encoder":
    """Return an encoder of the samples of several, one after the other, with parameters (G, …)."""
    stack = copy.deepcopy(encoders[0])
    kinds: dict[type[nn.Module], Any] = {nn.Linear: StackedLinear, nn.Embedding: StackedEmbedding}
    for name, layer in list(stack.named_modules()):
        if type(layer) in kinds:
            layers = [encoder.get_submodule(name) for encoder in encoders]
            parent, _, attribute = name.rpartition(".")
            setattr(stack.get_submodule(parent), attribute, kinds[type(layer)](layers))
    return stack


class Steps:
    """Steps of one encoder, or of several with stacked parameters; on CUDA, replays of a captured graph."""

    def __init__(self, trainers: "Sequence[Trainer]") -> None:
        self.trainers = trainers
        self.padded = any(trainer.padded for trainer in trainers)
        first = trainers[0]
        self._training = first.training
        self._device = first.device
        self._count = len(trainers)
        self._encoder = first.encoder if self._count == 1 else stacked_encoder([t.encoder for t in trainers])
        self._parameters: list[Tensor] = list(self._encoder.parameters())
        self._forward: Any = torch.compile(self._encoder) if self._training.compiled else self._encoder
        splits = [trainer.train_split for trainer in trainers]
        self._tokens = splits[0].tokens if self._count == 1 else torch.cat([split.tokens for split in splits])
        self._labels = splits[0].labels if self._count == 1 else torch.cat([split.labels for split in splits])
        dtype = self._parameters[0].dtype
        self._rate = torch.zeros((), dtype=dtype, device=self._device)
        self._totals = torch.zeros(2, self._count, dtype=dtype, device=self._device)  # losses, right answers
        self._graph: torch.cuda.CUDAGraph | None = None
        counts = ATTENTIONS[first.config.attention].changed_by_steps  # keys or steps, on the CPU
        self._captures = self._device.type == "cuda" and not counts
        self._groups = self._encoder.gradient_groups()
        self._frozen = first.frozen_rows(self._encoder)

    def epoch(self, after_batch: "Callable[[Trainer], None]") -> list[tuple[float, float]]:
        """Train an epoch; return the mean loss and the accuracy of each encoder over the epoch's steps."""
        samples = self._training.train_samples
        size = self._training.batch_size
        self._copy_fresh_samples()
        orders = [torch.randperm(samples, device=self._device) + i * samples for i in range(self._count)]
        order = orders[0][None] if self._count == 1 else torch.stack(orders)
        self._encoder.train()
        self._rate.fill_(self.trainers[0].learning_rate)
        self.trainers[0].set_rate()
        if self._captures and self._graph is None and size <= samples:
            self._capture(size)
        self._totals.zero_()
        for batch in torch.split(order, size, 1):
            if self._graph is not None and batch.shape[1] == size:
                self._batch.copy_(batch)
                self._graph.replay()
            else:
                self._step(batch)
            for trainer in self.trainers:
                after_batch(trainer)
        self._unstack()
        losses, hits = self._totals.tolist()  # the only wait for the device in an epoch
        return [(loss / samples, right / samples) for loss, right in zip(losses, hits, strict=True)]

    def _unstack(self) -> None:
        """Give each of several models its parameters."""
        for name, parameter in self._encoder.named_parameters() if self._count > 1 else ():
            for trainer, value in zip(self.trainers, parameter.detach(), strict=True):
                trainer.encoder.get_parameter(name).data.copy_(value)

    def _copy_fresh_samples(self) -> None:
        """Put fresh samples in the place of the last ones, which a graph reads."""
        samples = self._training.train_samples
        parts = self.trainers, torch.split(self._tokens, samples), torch.split(self._labels, samples)
        for trainer, tokens, labels in zip(*parts, strict=True):
            if trainer.train_split.tokens.data_ptr() != tokens.data_ptr():
                tokens.copy_(trainer.train_split.tokens)
                labels.copy_(trainer.train_split.labels)

    def _step(self, batch: Tensor) -> None:
        """Make one step on samples (G, b) of the data; nothing here may wait for the device."""
        tokens = self._tokens[batch.flatten()]
        labels = self._labels[batch.flatten()]
        logits = self._forward(tokens, self.padded)
        losses = F.cross_entropy(logits, labels, reduction="none").view(batch.shape)
        for parameter in self._parameters:
            parameter.grad = None
        (losses.mean(1).sum() + self._encoder.take_divergence()).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._totals[0] += losses.detach().sum(1)
            self._totals[1] += (logits.argmax(1) == labels).view(batch.shape).sum(1)
            self._update()

    def _update(self) -> None:
        for parameter, rows, _ in self._frozen:
            parameter.grad[rows] = 0  # type: ignore[index]  # after a backward pass there is one
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        clip = self._training.gradient_clip
        if self._count == 1:
            for group in self._groups:
                torch.nn.utils.clip_grad_norm_(group, clip, foreach=True)
        else:  # each model has its own norm
            norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
            factor = (clip / (norms + 1e-6)).clamp(max=1)
            for gradient in gradients:
                gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))
        self.trainers[0].step(self._parameters, self._rate)
        for parameter, rows, value in self._frozen:  # weight decay acts even without a gradient
            parameter[rows] = value

    def _capture(self, size: int) -> None:
        """Capture a step as a graph, and leave parameters, optimiser and generators as they were."""
        optimizer = self.trainers[0].optimizer  # of plain SGD, the only one for several, there is none
        memory: Any = {} if optimizer is None else optimizer.state
        self._batch = torch.arange(size, device=self._device).expand(self._count, -1).contiguous()
        values = [parameter.detach().clone() for parameter in self._parameters]
        states = {p: {name: t.clone() for name, t in state.items()} for p, state in memory.items()}
        generator_state = torch.cuda.get_rng_state(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._step(self._batch)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.grad = None
                parameter.copy_(value)
                for name, state in memory.get(parameter, {}).items():
                    state.copy_(states[parameter][name]) if parameter in states else state.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(self._batch)
        torch.cuda.set_rng_state(generator_state, self._device)


if find_spec("triton") is not None:  # comes with torch where CUDA is
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _kernel(scores, values, positions, length, K: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, WIDTH)
        rest = tl.load(scores + row * length + column, mask=column < length, other=-float("inf"))
        for n in tl.static_range(K):
            best = tl.argmax(rest, axis=0)
            tl.store(values + row * K + n, tl.max(rest, axis=0))
            tl.store(
                positions + row * K + n, tl.minimum(best, length - 1).to(tl.int64)
            )  # in the row after NaN, too
            rest = tl.where(column == best, -float("inf"), rest)

    @torch.library.custom_op("semdiag_models::largest_of_rows", mutates_args=())
    def largest_of_rows(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest entries of each row, their positions; of equal ones, the first; of -inf, any.

        torch's own takes ten times as long for a small k.
        """
        rows = scores.contiguous().view(-1, scores.shape[-1])
        values, positions = _empty(scores, k)
        width = triton.next_power_of_2(rows.shape[1])
        warps = max(1, min(8, width // 1024))
        _kernel[(len(rows),)](rows, values, positions, rows.shape[1], K=k, WIDTH=width, num_warps=warps)
        return values, positions

    @largest_of_rows.register_fake
    def _empty(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        shape = *scores.shape[:-1], k
        return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)
