"""The trainer: a finite data set, epoch by epoch, as in the paper; its memory, and the devices it runs on."""

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models.attention.attention import SHORT
from semdiag_models.attention.selection import ATTENTIONS
from semdiag_models.config import ModelConfig, TrainingConfig
from semdiag_models.encoder import Encoder
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
from semdiag_models.reading import LARGEST_JSON, InputError, RunLock, read_bytes, require_memory, unknown_name
from semdiag_models.step import (
    RandomState,
    Split,
    Stack,
    draw_data,
    draw_fresh,
    drawing_from,
    random_state,
    restore_random_state,
)
from semdiag_models.tasks import task_of


def train_epoch(
    trainers: "Sequence[Trainer]", states: list[RandomState] | None, after_batch: "Callable[[Trainer], None]"
) -> list[float]:
    """Train an epoch of one trainer, or of several at a time."""
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


_FLOAT, _INDEX = 4, 8  # bytes
_COPIES = 2, 5  # copies of the parameters: with gradients; in hand-derived steps also buffers


def parameter_count(model: ModelConfig) -> int:
    """Return the number of an encoder's parameters."""
    width, inner, mlp = model.width, model.heads * model.head_width, model.mlp_width
    attention = width * 3 * inner + 3 * inner + inner * width + width
    block = attention + width * mlp + mlp + mlp * width + width
    ends = (model.vocabulary_size + model.extra_tokens) * width + width * model.classes + model.classes
    return model.blocks * block + ends


def training_memory(model: ModelConfig, training: TrainingConfig, on_cpu: bool = True) -> int:
    """Return a lower bound of the main memory for training, in bytes."""
    length = model.length + model.extra_tokens
    by_hand = on_cpu and training.precision == "float32" and not training.compiled
    copies = _COPIES[by_hand] if on_cpu else 1
    copies += 2 * (on_cpu and training.optimizer != "sgd")
    needed = _FLOAT * copies * parameter_count(model)
    needed += _FLOAT * 2 * length * model.width  # positions, and their angles during construction
    needed += _FLOAT * model.blocks * model.heads * model.head_width * (model.clusters or 0)
    if training.text is None:  # windows of a text share memory
        needed += _INDEX * model.length * (training.train_samples + training.holdout_samples)
    if not on_cpu:
        return needed
    batch = min(training.batch_size, training.train_samples)
    per_token = 2 * model.width + 4 * model.heads * model.head_width + model.mlp_width
    needed += _FLOAT * batch * length * model.blocks * per_token
    if by_hand and length <= SHORT:  # weights of every block, and scores in two orders
        return needed + _FLOAT * batch * model.heads * length**2 * (model.blocks + 2)
    return needed + _square(model, length)


def _square(model: ModelConfig, length: int) -> int:
    """Return the bytes of scores or orders between all tokens of one sample that exist at the same time."""
    kind = ATTENTIONS[model.attention]
    entries = {
        "all": model.dropout > 0,  # one strip of one head
        "fixed": model.blocks * model.heads * kind.drawn,
        "redrawn": model.heads,
    }.get(kind.keeps, kind.follows_scores)
    return _FLOAT * entries * length**2


HISTORY_COLUMNS = (
    "epoch",
    "learning_rate",
    "train_loss",
    "train_accuracy",
    "holdout_loss",
    "holdout_accuracy",
    "seconds",
)


_ENTRIES = 2**25  # largest number of elements of an activation in evaluation, 128 MB


class DivergedError(RuntimeError):
    """Raised if the training loss is no longer a number; of several runs, ``members`` lists the diverged ones."""

    def __init__(self, message: str, members: tuple[int, ...] = (0,)) -> None:
        super().__init__(message)
        self.members = members


@dataclass(frozen=True)
class Progress:
    """Report of the trainer after each epoch: a row of the history."""

    row: dict[str, float]
    best: bool  # whether this is the highest held-out accuracy so far


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
        self.lock: RunLock | None = None  # lock of the run's folder, if it has one
        self.epoch = 0
        self.history: dict[str, list[float]] = {name: [] for name in HISTORY_COLUMNS}

    def release(self) -> None:
        """Release the run's folder."""
        if self.lock is not None:
            self.lock.release()

    @cached_property
    def stack(self) -> Stack | None:
        """Hand-derived steps; None where torch derives them: on accelerators, compiled, and in bf16."""
        training, by_hand = self.training, self.device.type == "cpu"
        return (
            Stack([self.encoder])
            if by_hand and training.precision == "float32" and not training.compiled
            else None
        )

    @property
    def learning_rate(self) -> float:
        """Step size of the next epoch."""
        return self.training.learning_rate * self.training.learning_rate_decay**self.epoch

    @property
    def converged(self) -> bool:
        """Whether the last epoch reached the training accuracy at which to stop."""
        until, reached = self.training.until, self.history["train_accuracy"][-1:]
        return until is not None and bool(reached) and reached[0] >= until

    @property
    def finished(self) -> bool:
        """Whether there is no further epoch to train."""
        return self.epoch >= self.training.epochs or self.converged

    def run(self, after_epoch: Callable[[Progress], None], after_batch: Callable[[], None] = lambda: None) -> None:
        """Train to the configured number of epochs, or to the training accuracy at which to stop."""
        while not self.finished:
            start = time.perf_counter()
            self.check_loss(self._train_epoch(after_batch))
            after_epoch(self.close_epoch(start))

    def begin_epoch(self) -> None:
        """Draw the samples of the next epoch, if every epoch has its own."""
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
        self.check_loss(train_loss + holdout_loss)  # the last step may have diverged
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
        """Refuse to continue after a sum of losses that is not a number."""
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
        return float(total)  # the only wait for the device in an epoch

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


def check_together(training: TrainingConfig) -> None:
    """Refuse options that only a single run supports."""
    if training.compiled or training.precision == "bf16":
        raise InputError(
            "Several runs at once support neither compilation nor bf16. Omit --compile and --precision bf16, or "
            "train them one by one."
        )


def train_together(
    trainers: Sequence[Trainer],
    states: list[RandomState],
    after_epoch: Callable[[Trainer, Progress], None],
    after_batch: Callable[[Trainer], None] = lambda trainer: None,
) -> None:
    """Train every trainer to its end; equal to training each alone, up to rounding."""
    for trainer in trainers:
        check_together(trainer.training)
    diverged: dict[int, str] = {}
    while unfinished := [i for i, trainer in enumerate(trainers) if i not in diverged and not trainer.finished]:
        epoch = min(trainers[i].epoch for i in unfinished)
        group = [i for i in unfinished if trainers[i].epoch == epoch]
        start = time.perf_counter()
        own = [states[i] for i in group]
        totals = train_epoch([trainers[i] for i in group], own, after_batch)
        share = (time.perf_counter() - start) / len(group)
        for i, state, total in zip(group, own, totals, strict=True):
            try:
                trainers[i].check_loss(total)
                restore_random_state(state)
                progress = trainers[i].close_epoch(time.perf_counter() - share)
            except DivergedError as error:
                diverged[i] = f"Seed {trainers[i].training.seed}: {error}"
                continue
            states[i] = random_state(trainers[i].device)  # evaluation also draws if the attention is redrawn
            after_epoch(trainers[i], progress)
    if diverged:
        raise DivergedError(" ".join(diverged.values()), tuple(diverged))


BEST = "cuda", "mps", "cpu"  # devices in the order in which auto prefers them


def find_device(name: str) -> torch.device:
    """Return the device that the user named."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if torch.accelerator.is_available() and (other := torch.accelerator.current_accelerator()):
        there.setdefault(other.type, True)
    if name == "auto":
        return torch.device(next(device for device in BEST if there.get(device)))
    if name not in there:
        raise unknown_name("device", name, ["auto", *there])
    if not there[name]:
        raise InputError(f"No {name} device here. Use --device auto or --device cpu.")
    return torch.device(name)


def with_float64(device: torch.device | str) -> torch.device:
    """Return the device, or the CPU instead of MPS, which has no float64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def processor() -> str:
    """Return the processor's name as the system reports it; like the thread count, it affects a run's rounding."""
    try:
        lines = read_bytes(Path("/proc/cpuinfo"), LARGEST_JSON).decode("utf-8", "replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (InputError, StopIteration):
        return platform.processor() or platform.machine()
