"""The trainer: a finite data set, epoch by epoch, as in the paper."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_files import InputError, RunLock, require_memory, unknown_name
from semdiag_models.config import ModelConfig, TrainingConfig
from semdiag_models.kinds import ATTENTIONS
from semdiag_models.model import Encoder
from semdiag_models.tasks import Split, draw_data, task_of

if TYPE_CHECKING:
    from semdiag_models.cuda_steps import Steps

HISTORY_COLUMNS = (
    "epoch", "learning_rate", "train_loss", "train_accuracy", "holdout_loss", "holdout_accuracy", "seconds",
)  # fmt: skip
_LARGEST_ACTIVATION = 2**25  # largest number of elements of an activation in evaluation, 128 MB
BEST = "cuda", "mps", "cpu"  # devices in the order in which auto prefers them
_GENERATORS = {"cuda": torch.cuda, "mps": torch.mps}  # beside the CPU's
RandomState = dict[str, Tensor]  # generator state by kind of device


def train_epoch(trainer: "Trainer", after_batch: Callable[["Trainer"], None]) -> tuple[float, float]:
    """Train one model for an epoch; return the mean loss and the accuracy over its steps, before each."""
    training = trainer.training
    encoder = trainer.encoder
    parameters: list[Tensor] = list(encoder.parameters())
    groups = encoder.gradient_groups()
    frozen = trainer.frozen_rows(encoder)
    trainer.set_rate()
    rate = torch.tensor(trainer.learning_rate, dtype=parameters[0].dtype, device=trainer.device)
    loss = torch.zeros((), dtype=rate.dtype, device=trainer.device)
    hits = torch.zeros_like(loss)
    encoder.train()
    order = torch.randperm(training.train_samples, device=trainer.device)
    for batch in torch.split(order, training.batch_size):
        tokens = trainer.train_split.tokens[batch]
        labels = trainer.train_split.labels[batch]
        logits = trainer.forward(tokens, trainer.padded)
        losses = F.cross_entropy(logits, labels, reduction="none")
        encoder.zero_grad()
        (losses.mean() + encoder.take_divergence()).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            loss += losses.detach().sum()
            hits += (logits.argmax(1) == labels).sum()
            for parameter, rows, _ in frozen:
                parameter.grad[rows] = 0  # type: ignore[index]  # after a backward pass there is one
            for group in groups:
                torch.nn.utils.clip_grad_norm_(group, training.gradient_clip, foreach=True)
            trainer.step(parameters, rate)
            for parameter, rows, values in frozen:  # weight decay acts even without a gradient
                parameter[rows] = values
        after_batch(trainer)
    return loss.item() / training.train_samples, hits.item() / training.train_samples


class DivergedError(RuntimeError):
    """Raised if the training loss is no longer a number; of several runs, ``members`` lists the diverged ones."""

    def __init__(self, message: str, members: tuple[int, ...] = (0,)) -> None:
        super().__init__(message)
        self.members = members


class Progress(NamedTuple):
    """Report of the trainer after each epoch: a row of the history."""

    row: dict[str, float]
    best: bool  # whether this is the highest held-out accuracy so far


class Trainer:
    """Trains one model, epoch by epoch; all state that a resumed run needs is in public attributes.

    With ``fast=False`` attention is in elementary operations, and steps on CUDA are no graphs.
    """

    def __init__(
        self, model: ModelConfig, training: TrainingConfig, device: torch.device, fast: bool = True
    ) -> None:
        _check_fit(model, training)
        require_memory(training_memory(model, training, device.type == "cpu"), "Training this model", largest=1)
        self.config = model
        self.training = training
        self.device = device
        self.fast = fast
        train, holdout = draw_data(training, model.length, model.pad_id)
        self.train_split = train.to(device)
        self.holdout_split = holdout.to(device)
        self.padded = self._any_pads(train, holdout)
        torch.manual_seed(training.seed)
        self.encoder = Encoder(model, fast).to(device)
        self.encoder.scale_queries_and_keys(training.query_key_scale)
        self.forward: Any = torch.compile(self.encoder) if training.compiled else self.encoder
        self.optimizer = make_optimizer(self.encoder, training, device)
        self.lock: RunLock | None = None  # lock of the run's folder, if it has one
        self.rng = random_state(device)  # states of the generators from which training continues
        self.epoch = 0
        self.history: dict[str, list[float]] = {name: [] for name in HISTORY_COLUMNS}

    def release(self) -> None:
        """Release the run's folder."""
        if self.lock is not None:
            self.lock.release()

    @property
    def learning_rate(self) -> float:
        """Step size of the next epoch."""
        return self.training.learning_rate * self.training.learning_rate_decay**self.epoch

    @property
    def finished(self) -> bool:
        """Whether there is no further epoch to train."""
        return ended(self.history, self.training)

    def frozen_rows(self, encoder: Encoder) -> list[tuple[Tensor, Any, Tensor]]:
        """Return an encoder's parameters that the training freezes, the rows of W_q and W_k, what stands there."""
        rows = slice(2 * self.config.heads * self.config.head_width)
        pairs: list[tuple[Tensor, Any]] = []
        for layer in range(self.config.blocks if "qk" in self.training.frozen else 0):
            qkv = encoder.attention(layer).qkv
            pairs += [(qkv.weight, (..., rows, slice(None))), (qkv.bias, (..., rows))]
        return [(parameter, at, parameter.detach()[at].clone()) for parameter, at in pairs]

    def set_rate(self) -> None:
        """Give the optimiser the learning rate of the next epoch."""
        rate = self.learning_rate
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate

    def step(self, parameters: list[Tensor], rate: Tensor) -> None:
        """Make a step of the optimiser; of plain gradient descent, without momentum as in the paper, itself."""
        if self.optimizer is not None:
            self.optimizer.step()
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.training.weight_decay:
            torch._foreach_add_(gradients, parameters, alpha=self.training.weight_decay)
        torch._foreach_mul_(gradients, rate)
        torch._foreach_add_(parameters, gradients, alpha=-1)

    def run(self, after_epoch: Callable[[Progress], None], after_batch: Callable[[], None] = lambda: None) -> None:
        """Train to the configured number of epochs, or to the training accuracy at which to stop."""
        train_together([self], lambda _, progress: after_epoch(progress), lambda _: after_batch())

    def begin_epoch(self) -> None:
        """Draw the samples of the next epoch, if every epoch has its own."""
        if self.training.fresh_samples:
            split, _ = draw_data(self.training, self.config.length, self.config.pad_id, self.epoch)
            self.padded = self._any_pads(split, self.holdout_split)
            self.train_split = split.to(self.device)

    def _any_pads(self, *splits: Split) -> bool:
        """Return whether PAD occurs and does not count; looking at every batch would wait for the device."""
        pad_id = self.config.pad_id
        return not self.config.pad_as_token and any(bool((s.tokens == pad_id).any()) for s in splits)

    def close_epoch(self, start: float, train_loss: float, train_accuracy: float) -> Progress:
        """Evaluate after an epoch, on the training samples only where asked, and write it into the history."""
        self.check_loss(train_loss)
        self.check_loss(
            sum(float(p.detach().sum()) for each in self.encoder.indexers() for p in each.parameters())
        )
        training = self.training
        if training.exact or training.until is not None or self.epoch + 1 == training.epochs:
            train_loss, train_accuracy = self.evaluate(self.train_split)
        holdout_loss, holdout_accuracy = self.evaluate(self.holdout_split)
        self.check_loss(train_loss + holdout_loss)  # the last step may have diverged
        best = holdout_accuracy > max(self.history["holdout_accuracy"], default=-math.inf)
        rate = self.learning_rate
        seconds = time.perf_counter() - start
        self.epoch += 1
        values = self.epoch, rate, train_loss, train_accuracy, holdout_loss, holdout_accuracy, seconds
        row = dict(zip(HISTORY_COLUMNS, values, strict=True))
        for name, value in row.items():
            self.history[name].append(value)
        return Progress(row, best)

    def check_loss(self, total: float) -> None:
        """Refuse to continue after a sum of losses that is not a number."""
        if not math.isfinite(total):
            where = f"{total} in epoch {self.epoch + 1} at learning rate {self.learning_rate:g}"
            why = f"the training loss became {where}. Try a smaller --learning-rate."
            raise DivergedError(f"Seed {self.training.seed}: {why}")

    @torch.no_grad()
    def evaluate(self, split: Split) -> tuple[float, float]:
        """Return the mean cross-entropy (nats) and accuracy in [0, 1] over a split, in evaluation mode."""
        self.encoder.eval()
        loss = torch.zeros((), device=self.device)
        hits = torch.zeros((), device=self.device)
        size = self._evaluation_batch(split.tokens.shape[1])
        for tokens, labels in zip(torch.split(split.tokens, size), torch.split(split.labels, size), strict=True):
            logits = self.encoder(tokens, self.padded)
            loss += F.cross_entropy(logits, labels, reduction="sum")
            hits += (logits.argmax(1) == labels).sum()
        return float(loss) / len(split.labels), float(hits) / len(split.labels)

    def _evaluation_batch(self, length: int) -> int:
        """Return how many samples to evaluate at once."""
        tokens = 5_000  # the calls cost little, and a processor's caches hold much
        elements = _LARGEST_ACTIVATION
        if self.device.type != "cpu":
            tokens = 1_000_000
            elements *= 8
        c = self.config
        widest = max(c.width, 3 * c.heads * c.head_width, c.mlp_width)
        return max(1, min(tokens // length, 2**24 // c.classes, elements // (length * widest)))


def _check_fit(model: ModelConfig, training: TrainingConfig) -> None:
    """Refuse a model that does not fit the task, and what only older versions could train."""
    task = task_of(training)
    if (model.vocabulary_size, model.classes) != (task.vocabulary_size, task.classes):
        numbers = f"{task.vocabulary_size} token ids and {task.classes} classes"
        raise InputError(f"{task.name} has {numbers}; the model has {model.vocabulary_size} and {model.classes}.")
    if model.length < training.length:
        raise InputError(f"The model has {model.length} positions, too few for length {training.length}.")
    if training.precision != "float32":
        why = f"Only versions up to 0.10 continue a run in {training.precision}."
        raise InputError(f"Training is in float32. {why}")


def ended(history: dict[str, list[float]], training: TrainingConfig) -> bool:
    """Return whether a run with this history has all its epochs, or has reached the accuracy at which to stop."""
    accuracies = history.get("train_accuracy", [])
    if len(accuracies) >= training.epochs:
        return True
    return training.until is not None and bool(accuracies) and accuracies[-1] >= training.until


def stackable(trainers: Sequence[Trainer]) -> bool:
    """Return whether runs can share their steps: on CUDA, with plain SGD, and equal in all but their seeds."""
    first = trainers[0]
    alike = {(t.config, t.epoch, replace(t.training, seed=0, query_key_scale=1.0)) for t in trainers}
    plain = first.optimizer is None and not ATTENTIONS[first.config.attention].changed_by_steps
    return len(trainers) > 1 and first.device.type == "cuda" and len(alike) == 1 and plain


def train_together(
    trainers: Sequence[Trainer], after_epoch: Callable[[Trainer, Progress], None],
    after_batch: Callable[[Trainer], None] = lambda trainer: None,
) -> None:  # fmt: skip
    """Train runs that can share their steps to their ends; those that end or diverge leave the others."""
    diverged: dict[int, str] = {}
    steps: Steps | None = None
    while group := [t for i, t in enumerate(trainers) if i not in diverged and not t.finished]:
        start = time.perf_counter()
        for trainer in group:
            trainer.begin_epoch()
        if len(group) == 1 and not (group[0].fast and group[0].device.type == "cuda"):
            results = [train_epoch(group[0], after_batch)]
        else:
            steps = _steps_of(group, steps)
            results = steps.epoch(after_batch)
        start += (time.perf_counter() - start) * (1 - 1 / len(group))  # each has its share
        for trainer, (loss, accuracy) in zip(group, results, strict=True):
            began = time.perf_counter()
            try:
                progress = trainer.close_epoch(start, loss, accuracy)
            except DivergedError as error:
                diverged[trainers.index(trainer)] = str(error)
                continue
            after_epoch(trainer, progress)
            start += time.perf_counter() - began
    if diverged:
        raise DivergedError(" ".join(diverged.values()), tuple(diverged))


def _steps_of(group: Sequence[Trainer], steps: "Steps | None") -> "Steps":
    """Return the steps of a group, new ones if its members or their padding changed."""
    from semdiag_models.cuda_steps import Steps  # which imports Triton where that is

    if steps is None or steps.trainers != group or steps.padded != any(trainer.padded for trainer in group):
        return Steps(group)
    return steps


def make_optimizer(
    encoder: Encoder, training: TrainingConfig, device: torch.device
) -> torch.optim.Optimizer | None:
    """Return Adam or AdamW; None for plain SGD, see :meth:`Trainer.step`."""
    if training.optimizer == "sgd":
        return None
    options: dict[str, Any] = {"lr": training.learning_rate, "foreach": True}
    if device.type == "cuda":  # in a graph, the step size must stand on the device
        options |= {"lr": torch.tensor(training.learning_rate, device=device), "capturable": True}
    if training.weight_decay is not None:
        options["weight_decay"] = training.weight_decay
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    return kind(encoder.parameters(), **options)


def training_memory(model: ModelConfig, training: TrainingConfig, on_cpu: bool = True) -> int:
    """Return a lower bound of the main memory for training, in bytes: data, on a CPU parameters and a batch."""
    length = model.length + model.extra_tokens
    inner = model.heads * model.head_width
    data = 0 if training.text else 8 * model.length * (training.train_samples + training.holdout_samples)
    per_block = 4 * model.width * inner + 2 * model.width * model.mlp_width
    parameters = model.blocks * per_block + (model.vocabulary_size + model.classes + 2 * length) * model.width
    if not on_cpu:
        return data + 4 * parameters
    batch = min(training.batch_size, training.train_samples)
    per_token = 2 * model.width + 4 * inner + model.mlp_width
    return data + 4 * (3 * parameters + batch * length * model.blocks * per_token)


def random_state(device: torch.device) -> RandomState:
    """Return the states of the CPU's and the device's global generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type in _GENERATORS:
        states[device.type] = _GENERATORS[device.type].get_rng_state(device)
    return states


def set_random_state(states: RandomState) -> None:
    """Restore the global generators of the available devices."""
    torch.set_rng_state(states["cpu"])
    for name, module in _GENERATORS.items():
        if name in states and module.is_available():
            module.set_rng_state(states[name])


def find_device(name: str) -> torch.device:
    """Return the device that the user named."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()):
        available.setdefault(accelerator.type, True)
    if name == "auto":
        return torch.device(next(device for device in BEST if available.get(device)))
    if name not in available:
        raise unknown_name("device", name, ["auto", *available])
    if not available[name]:
        raise InputError(f"No {name} device here. Use --device auto or --device cpu.")
    return torch.device(name)


def with_float64(device: torch.device | str) -> torch.device:
    """Return the device, or the CPU instead of MPS, which has no float64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device
