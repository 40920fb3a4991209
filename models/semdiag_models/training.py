"""The trainer: a finite data set, epoch by epoch, as the paper ran it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models.data import Split, draw_data, draw_fresh
from semdiag_models.encoder import Encoder
from semdiag_models.epoch import train_epoch
from semdiag_models.errors import InputError
from semdiag_models.memory_needs import training_memory
from semdiag_models.model_config import ModelConfig
from semdiag_models.optimization import (
    Frozen,
    check_precision,
    compile_steps,
    forward_precision,
    frozen_rows,
    make_optimizer,
    product_precision,
    set_learning_rate,
)
from semdiag_models.reading import require_memory
from semdiag_models.run_lock import RunLock
from semdiag_models.step import Stack
from semdiag_models.tasks import task_of
from semdiag_models.training_config import TrainingConfig

HISTORY_COLUMNS = (
    "epoch",
    "learning_rate",
    "train_loss",
    "train_accuracy",
    "holdout_loss",
    "holdout_accuracy",
    "seconds",
)


_ENTRIES = 2**25  # of an activation in evaluation, 128 MB


class DivergedError(RuntimeError):
    """The training loss is no longer a number; of several runs at once, ``members`` says in which."""

    def __init__(self, message: str, members: tuple[int, ...] = (0,)) -> None:
        super().__init__(message)
        self.members = members


@dataclass(frozen=True)
class Progress:
    """What the trainer reports after each epoch: a row of the history."""

    row: dict[str, float]
    best: bool  # highest held-out accuracy so far


class Trainer:
    """Trains one model, epoch by epoch; all state that a resumed run needs is in public attributes."""

    def __init__(self, model: ModelConfig, training: TrainingConfig, device: torch.device) -> None:
        self.config, self.training, self.device = model, training, device
        task = task_of(training)
        if (model.vocabulary_size, model.classes) != (task.vocabulary_size, task.classes):
            raise InputError(
                f"{task.name} has {task.vocabulary_size} token ids and {task.classes} classes; "
                f"the model has {model.vocabulary_size} and {model.classes}."
            )
        if model.length < training.length:
            raise InputError(f"The model has {model.length} positions, too few for length {training.length}.")
        check_precision(training.precision, device)
        require_memory(training_memory(model, training, device.type == "cpu"), "Training this model", largest=1)
        train, holdout = draw_data(training, model.length, model.pad_id)
        self.train_split = Split(*(t.to(device) for t in train))
        self.holdout_split = Split(*(t.to(device) for t in holdout))
        self.padded = self._any_pads(train, holdout)
        torch.manual_seed(training.seed)
        self.encoder = Encoder(model).to(device)
        self.encoder.scale_queries_and_keys(training.query_key_scale)
        self.optimizer = make_optimizer(self.encoder.parameters(), training)
        self._forward = compile_steps(self.encoder, device) if training.compiled else self.encoder
        self.lock: RunLock | None = None  # of the run's folder, if it has one
        self.epoch = 0
        self.history: dict[str, list[float]] = {name: [] for name in HISTORY_COLUMNS}

    def release(self) -> None:
        """Let go of the run's folder."""
        if self.lock is not None:
            self.lock.release()

    @cached_property
    def stack(self) -> Stack | None:
        """What derives the steps by hand; None where torch does: on accelerators, compiled, and in bf16."""
        training, by_hand = self.training, self.device.type == "cpu"
        return (
            Stack([self.encoder])
            if by_hand and training.precision == "float32" and not training.compiled
            else None
        )

    @property
    def learning_rate(self) -> float:
        """Step size of the epoch to come."""
        return self.training.learning_rate * self.training.learning_rate_decay**self.epoch

    @property
    def converged(self) -> bool:
        """Whether the last epoch reached the training accuracy to stop at."""
        until, reached = self.training.until, self.history["train_accuracy"][-1:]
        return until is not None and bool(reached) and reached[0] >= until

    @property
    def finished(self) -> bool:
        """Whether there is no further epoch to train."""
        return self.epoch >= self.training.epochs or self.converged

    def run(self, after_epoch: Callable[[Progress], None], after_batch: Callable[[], None] = lambda: None) -> None:
        """Train to the configured number of epochs, or to the training accuracy to stop at."""
        while not self.finished:
            start = time.perf_counter()
            self.check_loss(self._train_epoch(after_batch))
            after_epoch(self.close_epoch(start))

    def begin_epoch(self) -> None:
        """Draw the samples of the epoch to come, if every epoch has its own."""
        if self.training.fresh_samples:
            split = draw_fresh(self.training, self.epoch, self.config.length, self.config.pad_id)
            self.padded = self._any_pads(split, self.holdout_split)
            self.train_split = Split(*(t.to(self.device) for t in split))

    def _any_pads(self, *splits: Split) -> bool:
        """Return whether PAD occurs and does not count; looking at every batch would wait for the device."""
        pad_id = self.config.pad_id
        return not self.config.pad_as_token and any(bool((s.tokens == pad_id).any()) for s in splits)

    def close_epoch(self, start: float) -> Progress:
        """Evaluate after an epoch of steps and write it into the history."""
        train_loss, train_accuracy = self.evaluate(self.train_split)
        holdout_loss, holdout_accuracy = self.evaluate(self.holdout_split)
        self.check_loss(train_loss + holdout_loss)  # the last step may have been one too far
        best = holdout_accuracy > max(self.history["holdout_accuracy"], default=-math.inf)
        learning_rate = self.learning_rate
        self.epoch += 1
        values = (
            self.epoch,
            learning_rate,
            train_loss,
            train_accuracy,
            holdout_loss,
            holdout_accuracy,
            time.perf_counter() - start,
        )
        row = dict(zip(HISTORY_COLUMNS, values, strict=True))
        for name, value in row.items():
            self.history[name].append(value)
        return Progress(row, best)

    def check_loss(self, total: float) -> None:
        """Refuse to go on from a sum of losses that is not a number."""
        if not math.isfinite(total):
            raise DivergedError(
                f"The training loss became {total} in epoch {self.epoch + 1} at learning rate "
                f"{self.learning_rate:g}. Try a smaller --learning-rate."
            )

    def _train_epoch(self, after_batch: Callable[[], None]) -> float:
        if self.stack is not None:
            return train_epoch([self], None, lambda _: after_batch())[0]
        self.begin_epoch()
        self.encoder.train()
        set_learning_rate(self.optimizer, self.learning_rate)
        order = torch.randperm(self.training.train_samples, device=self.device)
        total = torch.zeros((), device=self.device)
        rows = frozen_rows(self.encoder, self.training).items()
        frozen = Frozen((self.encoder.get_parameter(name), slice(count)) for name, count in rows)
        with product_precision(self.training.precision):
            for batch in torch.split(order, self.training.batch_size):
                total += self._step(batch, frozen)
                after_batch()
        return float(total)  # the one moment in an epoch at which the device is waited for

    def _step(self, batch: Tensor, frozen: Frozen) -> Tensor:
        parameters = list(self.encoder.parameters())
        with forward_precision(self.training.precision, self.device):
            logits = self._forward(self.train_split.tokens[batch], self.padded)
            loss = F.cross_entropy(logits, self.train_split.labels[batch])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        frozen.drop_gradients()
        torch.nn.utils.clip_grad_norm_(parameters, self.training.gradient_clip, foreach=True)
        self.optimizer.step()
        frozen.restore(self.optimizer)
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, split: Split) -> tuple[float, float]:
        """Return the mean cross-entropy (nats) and accuracy in [0, 1] over a split, in evaluation mode."""
        self.encoder.eval()
        if self.stack is not None:
            self.stack.load()
        loss, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        # With 5,000 tokens the calls cost little and a processor's caches hold much; 16 million logits fit memory.
        at_once = 5_000 if self.device.type == "cpu" else 200_000
        c, length = self.config, split.tokens.shape[1]
        widest = max(c.width, 3 * c.heads * c.head_width, c.mlp_width)
        per_batch = max(1, min(at_once // length, 2**24 // c.classes, _ENTRIES // (length * widest)))
        parts = torch.split(split.tokens, per_batch), torch.split(split.labels, per_batch)
        for tokens, labels in zip(*parts, strict=True):
            if self.stack is not None:
                logits = self.stack.logits(tokens[None], self.padded)[0]
            else:
                logits = self.encoder(tokens, self.padded)
            loss += F.cross_entropy(logits, labels, reduction="sum")
            correct += (logits.argmax(1) == labels).sum()
        return float(loss) / len(split.labels), float(correct) / len(split.labels)
