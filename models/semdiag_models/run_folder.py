"""A run's folder: snapshots, history, resuming, and the runs of several seeds at a time."""

import hashlib
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from semdiag_files import InputError, RunLock, read_bytes, write_csv
from semdiag_models.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from semdiag_models.config import ModelConfig, TrainingConfig
from semdiag_models.kinds import DRAWN
from semdiag_models.train import (
    HISTORY_COLUMNS,
    DivergedError,
    Progress,
    Trainer,
    random_state,
    set_random_state,
    stackable,
    train_together,
)  # fmt: skip


def run_name(model: ModelConfig, training: TrainingConfig) -> str:
    """Return the name of a run's folder."""
    return f"{training.task_label}-{model.attention_label}-seed-{training.seed}"


def open_run(
    folder: Path, model: ModelConfig, training: TrainingConfig, device: torch.device, *,
    resume: bool, overwrite: bool,
) -> Trainer:  # fmt: skip
    """Prepare the folder and the trainer; check everything before writing anything."""
    last = folder / "last.pt"
    with ExitStack() as undo:
        lock = _lock(folder, undo) if folder.is_dir() else None
        if last.exists() and not (resume or overwrite):
            ways = "Add --resume to continue it, --overwrite to start anew, or name another folder with --out."
            raise InputError(f"{folder} already holds a run. {ways}")
        if training.compiled and device.type == "cpu" and not resume:
            raise InputError("A compiled step is slower on a CPU. Leave out --compile.")
        saved = _saved(last, model, training) if resume else None
        trainer = Trainer(model, training, device)
        try:
            if saved is not None:
                restore(trainer, saved)
        except InputError as error:
            raise InputError(f"{last} cannot be resumed: {error}") from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be made: {error.strerror}.") from None
        trainer.lock = lock or _lock(folder, undo)
        undo.pop_all()
    return trainer


def _lock(folder: Path, undo: ExitStack) -> RunLock:
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} cannot be written to: permission denied. Choose another folder with --out.")
    lock = RunLock(folder)
    undo.callback(lock.release)
    return lock


def _saved(last: Path, model: ModelConfig, training: TrainingConfig) -> Checkpoint:
    if not last.exists():
        raise InputError(f"Nothing to resume: {last} does not exist. Leave out --resume to start the run.")
    saved = read_checkpoint(last)
    free = {name: getattr(training, name) for name in ("epochs", "until", "snapshots", "compiled", "exact")}
    pairs = zip(_values(saved.model, replace(saved.training, **free)), _values(model, training), strict=False)
    for (name, before), (_, now) in pairs:
        if before != now:
            why = f"was trained with {name}={before}, not {now}. Use the run's own options to resume."
            raise InputError(f"{last} {why}")
    if saved.epoch > training.epochs:
        raise InputError(f"{last} is already at epoch {saved.epoch}, past --epochs {training.epochs}.")
    return saved


def _values(model: ModelConfig, training: TrainingConfig) -> list[tuple[str, object]]:
    """Return the fields of both records and of a text, with the tokenizer as a short hash."""
    values = training.to_dict()
    text = values.pop("text") or {}
    if text:
        text["model"] = hashlib.sha256(text["model"].encode()).hexdigest()[:8]
    return [*model.to_dict().items(), *values.items(), *text.items()]


def snapshot(trainer: Trainer, provenance: dict[str, Any], resumable: bool) -> Checkpoint:
    """Return a snapshot; a resumable one has the states of the generators and of the optimiser, too."""
    memory = trainer.optimizer.state if trainer.optimizer and resumable else {}
    states = {name: dict(memory[p]) for name, p in trainer.encoder.named_parameters() if memory.get(p)}
    state = trainer.encoder.state_dict()
    rng = random_state(trainer.device) if resumable else {}
    return Checkpoint(
        trainer.config, trainer.training, state, trainer.epoch, trainer.history, rng, provenance, states
    )


def restore(trainer: Trainer, saved: Checkpoint) -> None:
    """Continue from a snapshot."""
    if set(saved.history) != set(HISTORY_COLUMNS) or "cpu" not in saved.rng:
        raise InputError("history or random state is missing. A run's own last.pt has both.")
    trainer.encoder.load_state_dict(saved.state)
    trainer.epoch = saved.epoch
    trainer.history = saved.history
    parameters = dict(trainer.encoder.named_parameters())
    if saved.optimizer_state:
        if trainer.optimizer is None or saved.optimizer_state.keys() != parameters.keys():
            raise InputError("the optimiser's state does not fit the model's parameters.")
        scalar_device = trainer.device if trainer.device.type == "cuda" else "cpu"  # of the number of steps
        for name, values in saved.optimizer_state.items():
            for quantity, value in values.items():
                if value.shape not in (parameters[name].shape, torch.Size([])) or not value.is_floating_point():
                    raise InputError(f"the optimiser's {quantity!r} of {name!r} does not fit the model.")
                device = trainer.device if value.ndim else scalar_device
                trainer.optimizer.state[parameters[name]][quantity] = value.to(device, copy=True)
    try:
        set_random_state(saved.rng)
        trainer.rng = random_state(trainer.device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"its random state is damaged ({error}).") from None


def open_seed_runs(
    parent: Path, model: ModelConfig, training: TrainingConfig, seeds: tuple[int, ...], device: torch.device, *,
    resume: bool, overwrite: bool,
) -> dict[Trainer, Path]:  # fmt: skip
    """Return a trainer and its folder for every seed, or nothing."""
    if len(set(seeds)) != len(seeds) or not seeds:
        raise InputError(f"Seeds to train at once must all be different. Got {','.join(map(str, seeds))}.")
    runs = []
    for seed in seeds:  # with keys that are drawn, every seed keeps different ones
        seed_model = replace(model, selection_seed=seed) if model.attention in DRAWN else model
        runs.append((seed_model, replace(training, seed=seed)))
    folders = [parent / run_name(*run) for run in runs]
    begun = [(folder / "last.pt").exists() for folder in folders]
    opened: dict[Trainer, Path] = {}
    with ExitStack() as undo:
        for folder, run, exists in zip(folders, runs, begun, strict=True):
            resumed = resume and (exists or not any(begun))
            trainer = open_run(folder, *run, device, resume=resumed, overwrite=overwrite)
            undo.callback(trainer.release)
            opened[trainer] = folder
        undo.pop_all()
    return opened


def train_run(
    folder: Path, trainer: Trainer, provenance: dict[str, Any],
    after_epoch: Callable[[Progress], None] = lambda progress: None,
    after_batch: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Train to the end, saving after every epoch: ``last.pt``, ``best.pt``, named epochs, ``history.csv``."""
    train_seed_runs({trainer: folder}, provenance, lambda _, p: after_epoch(p), lambda _: after_batch())


def train_seed_runs(
    folders: dict[Trainer, Path], provenance: dict[str, Any],
    after_epoch: Callable[[Trainer, Progress], None] = lambda trainer, progress: None,
    after_batch: Callable[[Trainer], None] = lambda trainer: None,
) -> None:  # fmt: skip
    """Train all runs to their ends: on CUDA together if they can share their steps, else one after another."""
    trainers = list(folders)
    one_stack = stackable(trainers)
    facts = {**provenance, "seeds_at_once": len(trainers)} if one_stack else provenance
    finish: dict[Trainer, Callable[[Progress], None]] = {}
    diverged: dict[int, str] = {}

    def close_epoch(trainer: Trainer, progress: Progress) -> None:
        finish[trainer](progress)
        after_epoch(trainer, progress)

    try:
        for group in [trainers] if one_stack else [[trainer] for trainer in trainers]:
            finish |= {trainer: _start_run(folders[trainer], trainer, facts) for trainer in group}
            set_random_state(group[0].rng)
            try:
                train_together(group, close_epoch, after_batch)
            except DivergedError as error:
                diverged |= {trainers.index(group[member]): str(error) for member in error.members}
    finally:
        for trainer in trainers:
            trainer.release()
    if diverged:
        raise DivergedError(" ".join(dict.fromkeys(diverged.values())), tuple(diverged))


def processor() -> str:
    """Return the processor's name as the system reports it; like the thread count, it affects a run's rounding."""
    try:
        lines = read_bytes(Path("/proc/cpuinfo")).decode("utf-8", "replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (InputError, StopIteration):
        return platform.processor() or platform.machine()


def _start_run(folder: Path, trainer: Trainer, provenance: dict[str, Any]) -> Callable[[Progress], None]:
    """Clean up the folder, save the initialisation, and return a function that saves an epoch."""
    set_random_state(trainer.rng)
    provenance = {
        "semdiag": version("semdiag"), "torch": str(torch.__version__), "device": trainer.device.type,
        "threads": torch.get_num_threads(), "processor": processor(), **provenance,
    }  # fmt: skip

    def save(*names: str) -> None:
        for name in names:  # a run resumes from the last one
            write_checkpoint(folder / f"{name}.pt", snapshot(trainer, provenance, resumable=name == "last"))

    def write_history() -> None:
        write_csv(folder / "history.csv", [trainer.history, *zip(*trainer.history.values(), strict=True)])

    def finish_epoch(progress: Progress) -> None:
        named = [f"epoch-{trainer.epoch}"] if trainer.epoch in trainer.training.snapshots else []
        save(*named, *(["best"] if progress.best else []), "last")
        write_history()

    for half_written in [*folder.glob(".*.pt.*"), *folder.glob(".history.csv.tmp")]:
        half_written.unlink()  # from a process that was killed
    if trainer.epoch == 0:
        save("last", "epoch-0")  # first, so that the folder can be resumed if the process dies here
        later = (path for path in folder.glob("epoch-*.pt") if path.name != "epoch-0.pt")
        for old in [*later, folder / "best.pt", folder / "history.csv"]:
            old.unlink(missing_ok=True)  # from the overwritten run
    else:  # the process may have died before it wrote the history
        write_history()
    return finish_epoch
