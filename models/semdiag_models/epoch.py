"""Train an epoch with hand-derived steps, for one trainer or several at once."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from semdiag_models.optimization import Frozen, frozen_rows, make_optimizer, product_precision, set_learning_rate
from semdiag_models.random_state import RandomState, drawing_from
from semdiag_models.step import Stack

if TYPE_CHECKING:
    from semdiag_models.training import Trainer


def train_epoch(
    trainers: "Sequence[Trainer]", states: list[RandomState] | None, after_batch: "Callable[[Trainer], None]"
) -> list[float]:
    """Train an epoch, of one trainer or several at once."""
    first = trainers[0]
    stack = first.stack if states is None and first.stack else Stack([t.encoder for t in trainers], states)
    stack.load()
    parameters = nn.Parameter(stack.parameters)
    parameters.grad = stack.gradients
    optimizer = make_optimizer([parameters], first.training)
    set_learning_rate(optimizer, first.learning_rate)
    for i, trainer in enumerate(trainers):
        trainer.begin_epoch()
        set_learning_rate(trainer.optimizer, trainer.learning_rate)
        _load_optimizer(optimizer.state[parameters], stack, i, trainer)
    frozen_parts = frozen_rows(first.encoder, first.training).items()
    frozen = Frozen((parameters, stack.rows(name, count)) for name, count in frozen_parts)
    orders = []
    for i in range(len(trainers)):
        with drawing_from(states, i, first.device):
            orders.append(torch.randperm(first.training.train_samples, device=first.device))
    tokens, labels = (torch.stack(t) for t in zip(*(t.train_split for t in trainers), strict=True))
    padded = any(trainer.padded for trainer in trainers)
    member = torch.arange(len(trainers), device=first.device)[:, None]
    total = torch.zeros(len(trainers), device=first.device)
    with product_precision(first.training.precision):
        for batch in torch.split(torch.stack(orders), first.training.batch_size, dim=1):
            total += stack.differentiate(tokens[member, batch], labels[member, batch], padded)
            with torch.inference_mode():  # no autograd bookkeeping
                frozen.drop_gradients()
                stack.clip_gradients(first.training.gradient_clip)
                optimizer.step()
                frozen.restore(optimizer)
            for trainer in trainers:
                after_batch(trainer)
    totals: list[float] = total.tolist()
    for i, (trainer, sum_of_losses) in enumerate(zip(trainers, totals, strict=True)):
        if math.isfinite(sum_of_losses):  # a diverged one keeps its last good epoch
            stack.store(i)
            _store_optimizer(optimizer.state[parameters], stack, i, trainer)
    return totals


def _load_optimizer(state: dict[str, Tensor], stack: Stack, i: int, trainer: "Trainer") -> None:
    for name, parameter in trainer.encoder.named_parameters():
        for quantity, value in trainer.optimizer.state.get(parameter, {}).items():
            if value.ndim == 0:  # the number of steps, the same for all
                state[quantity] = value.clone()
                continue
            whole = state.setdefault(quantity, torch.zeros_like(stack.parameters))
            dict(stack.parts(whole, i))[name].copy_(value)


def _store_optimizer(state: dict[str, Tensor], stack: Stack, i: int, trainer: "Trainer") -> None:
    for quantity, whole in state.items():
        parts = dict(stack.parts(whole, i)) if whole.ndim else {}
        for name, parameter in trainer.encoder.named_parameters():
            trainer.optimizer.state[parameter][quantity] = parts[name].clone() if parts else whole.clone()
