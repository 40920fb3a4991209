"""Run folders of several seeds of one configuration, trained at once."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from semdiag_models.attention.kinds import DRAWN
from semdiag_models.errors import InputError
from semdiag_models.model_config import ModelConfig
from semdiag_models.random_state import RandomState, random_state, restore_random_state
from semdiag_models.run_folder import open_run, run_name, start_run
from semdiag_models.stacking import check_together, train_together
from semdiag_models.training import Progress, Trainer
from semdiag_models.training_config import TrainingConfig


@dataclass
class SeedRun:
    """One seed's run."""

    folder: Path
    trainer: Trainer
    state: RandomState  # of the generators, from which the trainer continues


def open_seed_runs(
    parent: Path,
    model: ModelConfig,
    training: TrainingConfig,
    seeds: tuple[int, ...],
    device: torch.device,
    *,
    resume: bool,
    overwrite: bool,
) -> list[SeedRun]:
    """Prepare a folder and a trainer for every seed, or none."""
    if len(set(seeds)) != len(seeds) or not seeds:
        raise InputError(f"Seeds to train at once must all be different. Got {','.join(map(str, seeds))}.")
    check_together(training)
    drawn = model.attention in DRAWN  # every seed keeps different keys
    models = [replace(model, selection_seed=seed) if drawn else model for seed in seeds]
    configurations = [replace(training, seed=seed) for seed in seeds]
    folders = [parent / run_name(*both) for both in zip(models, configurations, strict=True)]
    there = [(folder / "last.pt").exists() for folder in folders]
    runs: list[SeedRun] = []
    with ExitStack() as undo:
        for folder, own, configuration, exists in zip(folders, models, configurations, there, strict=True):
            go_on = resume and (exists or not any(there))
            trainer = open_run(folder, own, configuration, device, resume=go_on, overwrite=overwrite)
            undo.callback(trainer.release)
            runs.append(SeedRun(folder, trainer, random_state(device)))
        undo.pop_all()
    return runs


def train_seed_runs(
    runs: list[SeedRun],
    provenance: dict[str, Any],
    after_epoch: Callable[[Trainer, Progress], None] = lambda trainer, progress: None,
    after_batch: Callable[[Trainer], None] = lambda trainer: None,
) -> None:
    """Train all runs to their ends; each folder is as if its seed had been trained alone, up to rounding."""
    provenance = {**provenance, "seeds_at_once": len(runs)}
    finish: dict[int, Callable[[Progress], None]] = {}
    try:
        for run in runs:
            restore_random_state(run.state)
            tell = lambda progress, trainer=run.trainer: after_epoch(trainer, progress)  # noqa: E731
            finish[id(run.trainer)] = start_run(run.folder, run.trainer, provenance, tell)
        train_together(
            [run.trainer for run in runs],
            [run.state for run in runs],
            lambda trainer, progress: finish[id(trainer)](progress),
            after_batch,
        )
    finally:
        for run in runs:
            run.trainer.release()
