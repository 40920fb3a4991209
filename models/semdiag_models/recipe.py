"""Complete a user's choices with the task's recipe, into the two records of a run."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from semdiag_models.attention.kinds import DRAWN
from semdiag_models.model_config import ModelConfig
from semdiag_models.tasks import Classification, Text
from semdiag_models.training_config import ListOpsTrees, TrainingConfig

ADAM_RATE = 0.001  # the recipes' learning rates are for plain SGD
_FROM_THE_TASK = ("vocabulary_size", "classes", "task", "text", "listops")


def configure(
    task: Classification, chosen: Mapping[str, Any], listops: ListOpsTrees | None = None
) -> tuple[ModelConfig, TrainingConfig]:
    """Complete a user's choices with the recipe of the task."""
    values = {**vars(task.recipe), **{name: value for name, value in chosen.items() if value is not None}}
    if values.get("optimizer", "sgd") != "sgd" and chosen.get("learning_rate") is None:
        values["learning_rate"] = ADAM_RATE
    if values.get("attention") in DRAWN:  # every seed keeps different keys
        values.setdefault("selection_seed", values.get("seed", TrainingConfig.seed))
    positions = padded_length(values["length"], values.get("k"), values.get("pad_as_token", False))
    model = {**values, "length": positions}
    return (
        ModelConfig(task.vocabulary_size, task.classes, **_of(ModelConfig, model)),
        TrainingConfig(
            task.name,
            text=task.source if isinstance(task, Text) else None,
            listops=listops,
            **_of(TrainingConfig, values),
        ),
    )


def padded_length(length: int, k: int | None, pad_as_token: bool) -> int:
    """Return a model's number of positions for samples of a length: with ``pad_as_token`` a multiple of k."""
    return -(-length // k) * k if pad_as_token and k is not None and k > 0 else length


def _of(record: type[ModelConfig | TrainingConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(record)} - set(_FROM_THE_TASK)
    return {name: value for name, value in values.items() if name in names}
