"""Several seeds of one configuration trained at once: stacked parameters, one step for all.

The batch of the stacked encoder is the batches of the seeds, one after another. Attention, norms and pooling
work sample by sample and need no change; linear layers and the embedding use each seed's own parameters, and
everything random is drawn for each seed from its own state, as it would be alone.
"""

import copy
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models.encoder import Encoder
from semdiag_models.errors import InputError
from semdiag_models.optimization import forward_precision, make_optimizer, product_precision, set_learning_rate
from semdiag_models.random_state import RandomState, restore_random_state, stream, streams
from semdiag_models.training import DivergedError, Progress, Trainer


class _StackedLinear(nn.Module):
    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = _stacked([layer.weight for layer in layers])  # (S, out, in)
        self.bias = _stacked([layer.bias for layer in layers])  # (S, out)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each seed's layer to its part of the batch: (S·B, …, in) -> (S·B, …, out)."""
        rows = x.reshape(len(self.weight), -1, x.shape[-1])
        return torch.baddbmm(self.bias[:, None], rows, self.weight.transpose(1, 2)).view(*x.shape[:-1], -1)


class _StackedEmbedding(nn.Module):
    def __init__(self, tables: Sequence[nn.Embedding]) -> None:
        super().__init__()
        self.weight = _stacked([table.weight for table in tables])  # (S, V, d)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look each seed's tokens up in its own table: (S·B, L) -> (S·B, L, d)."""
        seeds, vocabulary, _ = self.weight.shape
        first_row = torch.arange(0, seeds * vocabulary, vocabulary, device=tokens.device)
        rows = tokens.view(seeds, -1) + first_row[:, None]
        return F.embedding(rows.view_as(tokens), self.weight.flatten(0, 1))


_STACKED: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Linear: _StackedLinear,
    nn.Embedding: _StackedEmbedding,
}


def _stacked(parameters: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.stack([p.detach() for p in parameters]))


def stack_encoders(encoders: Sequence[Encoder]) -> Encoder:
    """One encoder whose batch is made of the batches of several.

    Args:
        encoders: of one configuration.

    Returns:
        An encoder whose parameters have the old names and one more dimension in front, the encoder.

    Raises:
        InputError: if it holds a parameter that is neither in a linear layer nor in an embedding.
    """
    stacked = copy.deepcopy(encoders[0])
    for name, module in list(stacked.named_modules()):
        if type(module) in _STACKED:
            parts = [encoder.get_submodule(name) for encoder in encoders]
            stacked.set_submodule(name, _STACKED[type(module)](parts))
    whole = dict(stacked.named_parameters())
    for name, parameter in encoders[0].named_parameters():
        if whole[name].shape != (len(encoders), *parameter.shape):
            raise InputError(
                f"This model cannot be trained with several seeds at once: its {name} is not stacked."
            )
    return stacked


def train_together(
    trainers: Sequence[Trainer],
    states: list[RandomState],
    after_epoch: Callable[[Trainer, Progress], None],
    after_batch: Callable[[Trainer], None] = lambda trainer: None,
) -> None:
    """Train every trainer to its end; equal to training each alone, up to rounding.

    Trainers that lag behind (a run was killed while it saved) are brought up first; one that has converged
    leaves the stack.

    Args:
        trainers: alike but for the seed.
        states: the state of the random generators in which each trainer goes on; kept up to date.
        after_epoch: called for each trainer after its epoch, with the generators in its own state.
        after_batch: called for each trainer after a step.

    Raises:
        DivergedError: if the loss of a seed is no longer a number; the other seeds have finished the epoch.
        InputError: if the steps are to be compiled, or the model cannot be stacked.
    """
    if any(trainer.training.compiled for trainer in trainers):
        raise InputError(
            "Several seeds at once cannot be compiled. Leave out --compile, or train them one by one."
        )
    while unfinished := [i for i, trainer in enumerate(trainers) if not trainer.finished]:
        epoch = min(trainers[i].epoch for i in unfinished)
        group = [i for i in unfinished if trainers[i].epoch == epoch]
        start = time.perf_counter()
        own = [states[i] for i in group]
        totals = _train_epoch([trainers[i] for i in group], own, after_batch)
        share = (time.perf_counter() - start) / len(group)
        diverged: DivergedError | None = None
        for i, state, total in zip(group, own, totals, strict=True):
            try:
                trainers[i].check_loss(total)
            except DivergedError as error:
                diverged = DivergedError(f"Seed {trainers[i].training.seed}: {error}")
                continue
            states[i] = state
            restore_random_state(state)
            after_epoch(trainers[i], trainers[i].close_epoch(time.perf_counter() - share))
        if diverged is not None:
            raise diverged


def _train_epoch(
    trainers: list[Trainer], states: list[RandomState], after_batch: Callable[[Trainer], None]
) -> list[float]:
    first, seeds = trainers[0], len(trainers)
    encoder = stack_encoders([trainer.encoder for trainer in trainers]).train()
    parameters = list(encoder.parameters())
    optimizer = make_optimizer(parameters, first.training)
    set_learning_rate(optimizer, first.learning_rate)
    _load_optimizer(optimizer, trainers)
    tokens, labels = (torch.stack(t) for t in zip(*(t.train_split for t in trainers), strict=True))
    padded = any(trainer.padded for trainer in trainers)
    seed = torch.arange(seeds, device=first.device)[:, None]
    total = torch.zeros(seeds, device=first.device)
    with product_precision(first.training.precision):
        for batch in torch.split(_orders(trainers, states), first.training.batch_size, dim=1):
            with forward_precision(first.training.precision, first.device), streams(states):
                logits = encoder(tokens[seed, batch].flatten(0, 1), padded)
                each = F.cross_entropy(logits, labels[seed, batch].flatten(), reduction="none")
            losses = each.view(seeds, -1).mean(1)
            optimizer.zero_grad()
            losses.sum().backward()  # type: ignore[no-untyped-call]
            _clip_each(parameters, first.training.gradient_clip)
            optimizer.step()
            total += losses.detach()
            for trainer in trainers:
                after_batch(trainer)
    totals: list[float] = total.tolist()
    for part, (trainer, sum_of_losses) in enumerate(zip(trainers, totals, strict=True)):
        if sum_of_losses - sum_of_losses == 0:  # finite: a seed that has diverged keeps its last good epoch
            _take_back(trainer, encoder, optimizer, part)
    return totals


def _orders(trainers: list[Trainer], states: list[RandomState]) -> Tensor:
    """(S, N): the order in which each seed sees its samples."""
    orders = []
    for part, trainer in enumerate(trainers):
        with stream(states, part, trainer.device):
            orders.append(torch.randperm(trainer.training.train_samples, device=trainer.device))
    return torch.stack(orders)


def _clip_each(parameters: list[nn.Parameter], largest: float) -> None:
    """Scale each seed's gradient to a 2-norm of at most ``largest``, as ``clip_grad_norm_`` does for one."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
    factor = (largest / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))


def _load_optimizer(optimizer: torch.optim.Optimizer, trainers: list[Trainer]) -> None:
    parameters = zip(optimizer.param_groups[0]["params"], *(t.encoder.parameters() for t in trainers), strict=True)
    for stacked, *alone in parameters:
        states = [trainer.optimizer.state.get(p, {}) for trainer, p in zip(trainers, alone, strict=True)]
        for quantity, value in states[0].items():  # the number of steps is the same for all seeds
            parts = [state[quantity] for state in states]
            optimizer.state[stacked][quantity] = value.clone() if value.ndim == 0 else torch.stack(parts)


@torch.no_grad()
def _take_back(trainer: Trainer, stacked: Encoder, optimizer: torch.optim.Optimizer, part: int) -> None:
    for parameter, whole in zip(trainer.encoder.parameters(), stacked.parameters(), strict=True):
        parameter.copy_(whole[part])
        if whole in optimizer.state:
            trainer.optimizer.state[parameter] = {
                quantity: value.clone() if value.ndim == 0 else value[part].clone()
                for quantity, value in optimizer.state[whole].items()
            }
