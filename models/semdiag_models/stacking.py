"""Train several runs at once: one buffer of parameters, one step for all.

Linear layers, norms and residual branches of all models are computed together, attention together for models with
the same attention configuration; everything random is drawn for each run from its own state, as if it were alone.
"""

import time
from collections.abc import Callable, Sequence

from semdiag_models.epoch import train_epoch
from semdiag_models.errors import InputError
from semdiag_models.random_state import RandomState, random_state, restore_random_state
from semdiag_models.training import DivergedError, Progress, Trainer
from semdiag_models.training_config import TrainingConfig


def check_together(training: TrainingConfig) -> None:
    """Refuse options that only a single run supports.

    Raises:
        InputError: if the steps should be compiled or in bf16.
    """
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
    """Train every trainer to its end; equal to training each alone, up to rounding.

    Trainers that lag behind (after a run was killed while saving) catch up first; one that has converged or
    diverged leaves the stack.

    Args:
        trainers: equal except for seed and attention.
        states: the state of the random generators from which each trainer continues; kept up to date.
        after_epoch: called for each trainer after its epoch, with the generators in its state.
        after_batch: called for each trainer after a step.

    Raises:
        DivergedError: after all others have finished, if the loss of a run is not finite any more; ``members`` are
            the positions of the trainers.
        InputError: if the trainers differ in more, or the steps should be compiled or in bf16.
    """
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
