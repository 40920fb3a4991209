"""Train several runs at once: one buffer of parameters, one step for all."""

import time
from collections.abc import Callable, Sequence

from semdiag_models.epoch import train_epoch
from semdiag_models.errors import InputError
from semdiag_models.random_state import RandomState, random_state, restore_random_state
from semdiag_models.training import DivergedError, Progress, Trainer
from semdiag_models.training_config import TrainingConfig


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
