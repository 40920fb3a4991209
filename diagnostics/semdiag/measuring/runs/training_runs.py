"""The training runs behind checkpoints: their settings, and whether they are finished."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import pandas as pd

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.runs.tables import RUNS
from semdiag_models import ModelConfig
from semdiag_models.training_config import TrainingConfig

# What may differ between compared runs: the attention itself, and the length of training.
_ATTENTION = (
    "attention", "k", "global_tokens", "selection_seed", "inverse_temperature", "hash_rounds", "hash_bits",
    "hashes", "clusters", "centroid_decay", "score_gradient",
)  # fmt: skip
_NOT_A_SETTING = ("seed", "epochs", "snapshots", "until", "compiled")
_COLUMNS = ("blocks", "heads", "width", "norm", "pooling")  # of the table of models
_USUAL: dict[str, Any] = {  # in the form of to_dict: tuples as lists
    f.name: [] if f.default == () else f.default for kind in (ModelConfig, TrainingConfig) for f in fields(kind)
}
TARGET = 0.95  # default training accuracy that counts as having learned
FINISHED, STOPPED, UNFINISHED, NOT_BEGUN = "finished", "stopped at --until", "unfinished", "not begun"


def run_table(models: Sequence[LoadedModel]) -> pd.DataFrame:
    """Describe the runs that models come from."""
    rows = [_row(model) for model in models if model.training is not None and "train_accuracy" in model.history]
    return RUNS.of_rows(rows)


def setting_in_words(model: LoadedModel) -> str:
    """Return the settings that differ from the defaults, except the attention and those with their own column."""
    chosen = {**_setting(model), "inverse_temperature": model.encoder.config.inverse_temperature}
    listed = {*_COLUMNS, "listops"}  # the task's label names the law of listops
    others = [n for n, value in chosen.items() if n not in listed and _USUAL[n] not in (MISSING, value)]
    return ", ".join(f"{name} {_in_words(chosen[name])}" for name in sorted(others)) or "usual"


def _setting(model: LoadedModel) -> dict[str, Any]:
    """Return all choices of architecture and training except the attention and the length of training."""
    setting = {name: value for name, value in model.encoder.config.to_dict().items() if name not in _ATTENTION}
    if model.training is not None:
        training = model.training.to_dict()
        training.pop("text", None)  # the task's label names it
        setting |= {name: value for name, value in training.items() if name not in _NOT_A_SETTING}
        setting["task"] = model.training.task_label
    return setting


def _row(model: LoadedModel) -> dict[str, Any]:
    assert model.training is not None  # run_table checks it
    return {
        "model": model.path,
        "task": model.training.task_label,
        "attention": _mask(model.encoder.config),
        "kind": model.encoder.config.attention,
        "seed": model.training.seed,
        "setting": json.dumps(_setting(model), sort_keys=True),
        "epochs": model.epoch,
        "planned": model.training.epochs,
        "state": _state(model),
    }


def _mask(config: ModelConfig) -> str:
    """Return the attention in one word, like ``topk-5``, or ``topk-5-times-2`` for an inverse temperature of 2."""
    factor = config.inverse_temperature
    return config.attention_label if factor == 1 else f"{config.attention_label}-times-{factor:g}"


def _state(model: LoadedModel) -> str:
    assert model.training is not None
    if model.snapshot != "last":  # the initialisation's own file, a named epoch, the best
        return "snapshot"
    accuracy = model.history["train_accuracy"]
    if not accuracy:
        return NOT_BEGUN
    if model.training.until is not None and accuracy[-1] >= model.training.until:
        return STOPPED
    return FINISHED if len(accuracy) >= model.training.epochs else UNFINISHED


def setting_labels(settings: Sequence[str]) -> dict[str, str]:
    """Label settings by their task and by what distinguishes them."""
    read = {setting: json.loads(setting) for setting in dict.fromkeys(settings)}
    labels = {}
    for setting, values in read.items():
        # What comes with another task, like its vocabulary, need not be named.
        alike = [other for other in read.values() if other["task"] == values["task"]]
        names = [name for name in values if len({json.dumps(other.get(name)) for other in alike}) > 1]
        labels[setting] = ", ".join([values["task"], *(f"{name} {_in_words(values.get(name))}" for name in names)])
    return labels


def _in_words(value: Any) -> str:
    """Return a setting's value as it is typed; ``none`` for an empty list or a value that is not set."""
    return "none" if value in (None, []) else "+".join(map(str, value)) if isinstance(value, list) else str(value)
