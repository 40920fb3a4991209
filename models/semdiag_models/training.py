"""The trainer: a finite data set, epoch by epoch, as in the paper; on CUDA every step is one graph."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_files import InputError, RunLock, refuse, require_memory, unknown_name
from semdiag_models.attention import ATTENTIONS
from semdiag_models.checkpoint import Checkpoint
from semdiag_models.config import ModelConfig, TrainingConfig
from semdiag_models.encoder import Encoder
from semdiag_models.tasks import Split, draw_data, task_of

HISTORY_COLUMNS = (
    "epoch", "learning_rate", "train_loss", "train_accuracy", "holdout_loss", "holdout_accuracy", "seconds",
)  # fmt: skip
_ENTRIES = 2**25  # largest number of elements of an activation in evaluation, 128 MB
_WARM_UP = 3  # steps before a graph is captured: kernels are chosen and compiled in them
BEST = "cuda", "mps", "cpu"  # devices in the order in which auto prefers them

_GENERATORS = {"cuda": torch.cuda, "mps": torch.mps}  # beside the CPU's
RandomState = dict[str, Tensor]  # generator state by kind of device


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


class Steps:
    """Steps of one encoder, or of several with stacked parameters; on CUDA, replays of a captured graph."""

    def __init__(self, trainers: "Sequence[Trainer]") -> None:
        first, self.trainers, self.padded = trainers[0], trainers, any(t.padded for t in trainers)
        self._training, self._device, self._count = first.training, first.device, len(trainers)
        self._encoder = first.encoder if self._count == 1 else Encoder.stacked([t.encoder for t in trainers])
        self._parameters: list[Tensor] = list(self._encoder.parameters())
        self._optimizer = first.optimizer  # of plain SGD, the only one for several, there is none
        self._memory: Any = {} if self._optimizer is None else self._optimizer.state
        self._forward: Any = torch.compile(self._encoder) if self._training.compiled else self._encoder
        splits = zip(*(trainer.train_split for trainer in trainers), strict=True)
        self._tokens, self._labels = (parts[0] if self._count == 1 else torch.cat(parts) for parts in splits)
        dtype = self._parameters[0].dtype
        self._rate = torch.zeros((), dtype=dtype, device=self._device)
        self._totals = torch.zeros(2, self._count, dtype=dtype, device=self._device)  # losses, right answers
        self._graph: torch.cuda.CUDAGraph | None = None
        c = self._encoder.config
        clustered = ATTENTIONS[c.attention].keeps == "clustered"  # keys are counted on the CPU
        self._captures = self._device.type == "cuda" and not clustered
        self._frozen: list[tuple[Tensor, Any, Tensor]] = []  # parameters, their frozen rows, what stands there
        for i in range(c.blocks if "qk" in self._training.frozen else 0):
            rows, qkv = slice(2 * c.heads * c.head_width), self._encoder.attention(i).qkv
            for parameter, at in ((qkv.weight, (..., rows, slice(None))), (qkv.bias, (..., rows))):
                self._frozen.append((parameter, at, parameter.detach()[at].clone()))

    def epoch(self, rate: float, after_batch: "Callable[[Trainer], None]") -> list[tuple[float, float]]:
        """Train an epoch; return the mean loss and the accuracy of each encoder over the epoch's steps."""
        n, size = self._training.train_samples, self._training.batch_size
        parts = self.trainers, self._tokens.split(n), self._labels.split(n)
        for trainer, tokens, labels in zip(*parts, strict=True):
            # fresh samples take the place of the last ones, which a graph reads
            if trainer.train_split.tokens.data_ptr() != tokens.data_ptr():
                tokens.copy_(trainer.train_split.tokens)
                labels.copy_(trainer.train_split.labels)
        orders = [torch.randperm(n, device=self._device) + i * n for i in range(self._count)]
        order = orders[0][None] if self._count == 1 else torch.stack(orders)
        self._encoder.train()
        self._rate.fill_(rate)
        for group in self._optimizer.param_groups if self._optimizer else ():
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        if self._captures and self._graph is None and size <= n:
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
        for name, parameter in self._encoder.named_parameters() if self._count > 1 else ():
            for trainer, value in zip(self.trainers, parameter.detach(), strict=True):
                trainer.encoder.get_parameter(name).data.copy_(value)
        losses, right = self._totals.tolist()  # the only wait for the device in an epoch
        return [(loss / n, hits / n) for loss, hits in zip(losses, right, strict=True)]

    def _step(self, batch: Tensor) -> None:
        """Make one step on samples (G, b) of the data; nothing here may wait for the device."""
        tokens, labels = self._tokens[batch.flatten()], self._labels[batch.flatten()]
        logits = self._forward(tokens, self.padded)
        losses = F.cross_entropy(logits, labels, reduction="none").view(batch.shape)
        for parameter in self._parameters:
            parameter.grad = None
        losses.mean(1).sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._totals[0] += losses.detach().sum(1)
            self._totals[1] += (logits.argmax(1) == labels).view(batch.shape).sum(1)
            self._update()

    def _update(self) -> None:
        for parameter, at, _ in self._frozen:
            parameter.grad[at] = 0  # type: ignore[index]  # after a backward pass there is one
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        clip = self._training.gradient_clip
        if self._count == 1:
            torch.nn.utils.clip_grad_norm_(self._parameters, clip, foreach=True)
        else:  # each model has its own norm
            norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
            factor = (clip / (norms + 1e-6)).clamp(max=1)
            for gradient in gradients:
                gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))
        if self._optimizer is not None:
            self._optimizer.step()
        else:
            if self._training.weight_decay:
                torch._foreach_add_(gradients, self._parameters, alpha=self._training.weight_decay)
            torch._foreach_mul_(gradients, self._rate)
            torch._foreach_add_(self._parameters, gradients, alpha=-1)
        for parameter, at, value in self._frozen:  # weight decay acts even without a gradient
            parameter[at] = value

    def _capture(self, size: int) -> None:
        """Capture a step as a graph, and leave parameters, optimiser and generators as they were."""
        self._batch = torch.arange(size, device=self._device).expand(self._count, -1).contiguous()
        before = [parameter.detach().clone() for parameter in self._parameters]
        memory = {p: {name: t.clone() for name, t in values.items()} for p, values in self._memory.items()}
        drawn = torch.cuda.get_rng_state(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._step(self._batch)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, before, strict=True):
                parameter.grad = None
                parameter.copy_(value)
                for name, state in self._memory.get(parameter, {}).items():
                    state.copy_(memory[parameter][name]) if parameter in memory else state.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(self._batch)
        torch.cuda.set_rng_state(drawn, self._device)


class DivergedError(RuntimeError):
    """Raised if the training loss is no longer a number; of several runs, ``members`` lists the diverged ones."""

    def __init__(self, message: str, members: tuple[int, ...] = (0,)) -> None:
        super().__init__(message)
        self.members = members


class Progress(NamedTuple):
    """Report of the trainer after each epoch: a row of the history."""

    row: dict[str, float]
    best: bool  # whether this is the highest held-out accuracy so far


def ended(history: dict[str, list[float]], training: TrainingConfig) -> bool:
    """Return whether a run with this history has all its epochs, or has reached the accuracy at which to stop."""
    reached, until = history.get("train_accuracy", []), training.until
    return len(reached) >= training.epochs or (until is not None and bool(reached) and reached[-1] >= until)


class Trainer:
    """Trains one model, epoch by epoch; all state that a resumed run needs is in public attributes."""

    def __init__(self, model: ModelConfig, training: TrainingConfig, device: torch.device) -> None:
        self.config, self.training, self.device = model, training, device
        task = task_of(training)
        wanted, own = (task.vocabulary_size, task.classes), (model.vocabulary_size, model.classes)
        numbers = f"{wanted[0]} token ids and {wanted[1]} classes; the model has {own[0]} and {own[1]}"
        refuse(own != wanted, f"{task.name} has {numbers}.")
        few = model.length < training.length
        refuse(few, f"The model has {model.length} positions, too few for length {training.length}.")
        other = training.precision != "float32"
        refuse(other, f"Training is in float32. Only versions up to 0.10 continue a run in {training.precision}.")
        require_memory(training_memory(model, training, device.type == "cpu"), "Training this model", largest=1)
        train, holdout = draw_data(training, model.length, model.pad_id)
        self.train_split = Split(*(t.to(device) for t in train))
        self.holdout_split = Split(*(t.to(device) for t in holdout))
        self.padded = self._any_pads(train, holdout)
        torch.manual_seed(training.seed)
        self.encoder = Encoder(model).to(device)
        self.encoder.scale_queries_and_keys(training.query_key_scale)
        self.optimizer = make_optimizer(self.encoder, training, device)
        self.lock: RunLock | None = None  # lock of the run's folder, if it has one
        self.rng = random_state(device)  # states of the generators from which training continues
        self.epoch = 0
        self.history: dict[str, list[float]] = {name: [] for name in HISTORY_COLUMNS}

    def release(self) -> None:
        """Release the run's folder."""
        if self.lock is not None:
            self.lock.release()

    def checkpoint(self, provenance: dict[str, Any], resumable: bool) -> Checkpoint:
        """Return a snapshot; a resumable one has the states of the generators and of the optimiser, too."""
        memory = self.optimizer.state if self.optimizer and resumable else {}
        states = {name: dict(memory[p]) for name, p in self.encoder.named_parameters() if memory.get(p)}
        state, rng = self.encoder.state_dict(), random_state(self.device) if resumable else {}
        return Checkpoint(self.config, self.training, state, self.epoch, self.history, rng, provenance, states)

    def restore(self, saved: Checkpoint) -> None:
        """Continue from a snapshot."""
        if set(saved.history) != set(HISTORY_COLUMNS) or "cpu" not in saved.rng:
            raise InputError("history or random state is missing. A run's own last.pt has both.")
        self.encoder.load_state_dict(saved.state)
        self.epoch, self.history = saved.epoch, saved.history
        parameters, state = dict(self.encoder.named_parameters()), saved.optimizer_state
        if state and (self.optimizer is None or state.keys() != parameters.keys()):
            raise InputError("the optimiser's state does not fit the model's parameters.")
        scalars = self.device if self.device.type == "cuda" else "cpu"  # where the number of steps is kept
        for name, values in state.items():
            parameter, own = parameters[name], self.optimizer.state[parameters[name]]  # type: ignore[union-attr]
            for quantity, value in values.items():
                if value.shape not in (parameter.shape, torch.Size([])) or not value.is_floating_point():
                    raise InputError(f"the optimiser's {quantity!r} of {name!r} does not fit the model.")
                own[quantity] = value.to(self.device if value.ndim else scalars, copy=True)
        try:
            set_random_state(saved.rng)
            self.rng = random_state(self.device)
        except (RuntimeError, TypeError) as error:
            raise InputError(f"its random state is damaged ({error}).") from None

    @property
    def learning_rate(self) -> float:
        """Step size of the next epoch."""
        return self.training.learning_rate * self.training.learning_rate_decay**self.epoch

    @property
    def finished(self) -> bool:
        """Whether there is no further epoch to train."""
        return ended(self.history, self.training)

    def run(self, after_epoch: Callable[[Progress], None], after_batch: Callable[[], None] = lambda: None) -> None:
        """Train to the configured number of epochs, or to the training accuracy at which to stop."""
        train_together([self], lambda _, progress: after_epoch(progress), lambda _: after_batch())

    def begin_epoch(self) -> None:
        """Draw the samples of the next epoch, if every epoch has its own."""
        if self.training.fresh_samples:
            split, _ = draw_data(self.training, self.config.length, self.config.pad_id, self.epoch)
            self.padded = self._any_pads(split, self.holdout_split)
            self.train_split = Split(*(t.to(self.device) for t in split))

    def _any_pads(self, *splits: Split) -> bool:
        """Return whether PAD occurs and does not count; looking at every batch would wait for the device."""
        pad_id = self.config.pad_id
        return not self.config.pad_as_token and any(bool((s.tokens == pad_id).any()) for s in splits)

    def close_epoch(self, start: float, train_loss: float, train_accuracy: float) -> Progress:
        """Evaluate after an epoch, on the training samples only where asked, and write it into the history."""
        self.check_loss(train_loss)
        training = self.training
        if training.exact or training.until is not None or self.epoch + 1 == training.epochs:
            train_loss, train_accuracy = self.evaluate(self.train_split)
        holdout_loss, holdout_accuracy = self.evaluate(self.holdout_split)
        self.check_loss(train_loss + holdout_loss)  # the last step may have diverged
        best = holdout_accuracy > max(self.history["holdout_accuracy"], default=-math.inf)
        rate, seconds = self.learning_rate, time.perf_counter() - start
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
        loss, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        # With 5,000 tokens the calls cost little and a processor's caches hold much; 16 million logits fit memory.
        at_once, entries = (5_000, _ENTRIES) if self.device.type == "cpu" else (1_000_000, 8 * _ENTRIES)
        c, length = self.config, split.tokens.shape[1]
        widest = max(c.width, 3 * c.heads * c.head_width, c.mlp_width)
        per_batch = max(1, min(at_once // length, 2**24 // c.classes, entries // (length * widest)))
        parts = torch.split(split.tokens, per_batch), torch.split(split.labels, per_batch)
        for tokens, labels in zip(*parts, strict=True):
            logits = self.encoder(tokens, self.padded)
            loss += F.cross_entropy(logits, labels, reduction="sum")
            correct += (logits.argmax(1) == labels).sum()
        return float(loss) / len(split.labels), float(correct) / len(split.labels)


def stackable(trainers: Sequence[Trainer]) -> bool:
    """Return whether runs can share their steps: on CUDA, with plain SGD, and equal in all but their seeds."""
    first = trainers[0]
    alike = {(t.config, t.epoch, replace(t.training, seed=0, query_key_scale=1.0)) for t in trainers}
    plain = first.optimizer is None and ATTENTIONS[first.config.attention].keeps != "clustered"
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
        if steps is None or steps.trainers != group or steps.padded != any(t.padded for t in group):
            steps = Steps(group)
        found = steps.epoch(group[0].learning_rate, after_batch)
        start += (time.perf_counter() - start) * (1 - 1 / len(group))  # each has its share
        for trainer, (loss, accuracy) in zip(group, found, strict=True):
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


def make_optimizer(
    encoder: Encoder, training: TrainingConfig, device: torch.device
) -> torch.optim.Optimizer | None:
    """Return Adam or AdamW; None for plain SGD, which :class:`Steps` does itself."""
    kind = {"sgd": None, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[training.optimizer]
    options: dict[str, Any] = {"lr": training.learning_rate, "foreach": True}
    if device.type == "cuda":  # in a graph, the step size must stand on the device
        options |= {"lr": torch.tensor(training.learning_rate, device=device), "capturable": True}
    if training.weight_decay is not None:
        options["weight_decay"] = training.weight_decay
    return None if kind is None else kind(encoder.parameters(), **options)


def training_memory(model: ModelConfig, training: TrainingConfig, on_cpu: bool = True) -> int:
    """Return a lower bound of the main memory for training, in bytes: data, on a CPU parameters and a batch."""
    length, inner = model.length + model.extra_tokens, model.heads * model.head_width
    needed = 8 * model.length * (training.train_samples + training.holdout_samples) * (training.text is None)
    per_block = 4 * model.width * inner + 2 * model.width * model.mlp_width
    parameters = model.blocks * per_block + (model.vocabulary_size + model.classes + 2 * length) * model.width
    if not on_cpu:
        return needed + 4 * parameters
    batch = min(training.batch_size, training.train_samples)
    per_token = 2 * model.width + 4 * inner + model.mlp_width
    return needed + 4 * (3 * parameters + batch * length * model.blocks * per_token)


def find_device(name: str) -> torch.device:
    """Return the device that the user named."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if torch.accelerator.is_available() and (other := torch.accelerator.current_accelerator()):
        there.setdefault(other.type, True)
    if name == "auto":
        return torch.device(next(device for device in BEST if there.get(device)))
    if name not in there:
        raise unknown_name("device", name, ["auto", *there])
    refuse(not there[name], f"No {name} device here. Use --device auto or --device cpu.")
    return torch.device(name)


def with_float64(device: torch.device | str) -> torch.device:
    """Return the device, or the CPU instead of MPS, which has no float64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device
