"""Tables in which a batch's tokens are looked up; the training runs behind checkpoints and their settings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from semdiag.capturing.batches import MASK_NAMES, Batch, entries
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.table import Table, columns_of
from semdiag_models import ModelConfig
from semdiag_models.config import TrainingConfig

_NO_TOKENS = (*MASK_NAMES, "labels", "position_ids", "token_type_ids")


def token_ids(batch: Batch) -> dict[str | int, Tensor]:
    """Return possible token ids in a batch: tensors (B, L) of whole numbers, unless the name tells otherwise."""
    tensors = [(name, x) for name, x in entries(batch) if isinstance(x, Tensor) and name not in _NO_TOKENS]
    tensors.sort(key=lambda entry: entry[0] != "decoder_input_ids")
    return {name: x for name, x in tensors if x.ndim == 2 and x.dtype in (torch.int64, torch.int32)}


class TokenTables(TorchFunctionMode):
    """Records, in its context, the tables in which the tokens of a batch are looked up."""

    def __init__(self, ids: Mapping[str | int, Tensor]) -> None:
        super().__init__()
        self._ids = ids
        self.tables: dict[str | int, list[Tensor]] = {place: [] for place in ids}
        self._axes: list[tuple[Tensor, int]] = []

    def axis(self, table: Tensor) -> int | None:
        """Return the axis of samples at the last look-up of tokens in a table (V, d): 0 or 1; None if never."""
        return next((axis for looked_up, axis in reversed(self._axes) if looked_up is table), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            named = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            for place, ids in self._ids.items():
                axis = _axis_of(ids, named["input"])
                if axis is not None:
                    self.tables[place].append(named["weight"])
                    self._axes.append((named["weight"], axis))
        return func(*args, **kwargs)


def _axis_of(ids: Tensor, looked_up: Tensor) -> int | None:
    """Return the axis of samples in looked-up ids (B, L') or (L', B) that contain ``ids`` (B, L); None if none."""
    if looked_up.ndim != 2:
        return None
    steps = ids.diff(dim=1)
    like_positions = not (ids != ids[:1]).any() and not (steps != steps[:, :1]).any()
    if like_positions and looked_up.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
        return None
    for axis, turned in enumerate((looked_up, looked_up.T)):
        if len(turned) == len(ids) and turned.shape[1] >= ids.shape[1] > 0:
            parts = turned.unfold(1, ids.shape[1], 1)  # (B, places, L)
            if (parts == ids.to(looked_up.device)[:, None]).all(2).all(0).any():
                return axis
    return None


RUNS = Table(
    "runs",
    "One row per training run.",
    columns_of("model task attention kind str; seed int64; setting str; epochs planned int64; state str"),
)

# Possible differences between compared runs: the attention itself, and the length of training.
_ATTENTION = (
    "attention", "k", "global_tokens", "selection_seed", "inverse_temperature", "hash_rounds", "hash_bits",
    "hashes", "clusters", "centroid_decay", "score_gradient",
)  # fmt: skip
_NOT_A_SETTING = ("seed", "epochs", "snapshots", "until", "compiled", "text")  # the task's label contains the text
# in the task's label (the trees of listops) or in the table of models, and so left out of the setting in words
_LISTED = ("blocks", "heads", "width", "norm", "pooling", "listops")
_USUAL: dict[str, Any] = {  # default values, tuples as lists as in to_dict
    f.name: [] if f.default == () else f.default for kind in (ModelConfig, TrainingConfig) for f in fields(kind)
}
TARGET = 0.95  # default training accuracy at which a task counts as learned
FINISHED = "finished"
STOPPED = "stopped at --until"
UNFINISHED = "unfinished"
NOT_BEGUN = "not begun"


def run_table(models: Sequence[LoadedModel]) -> pd.DataFrame:
    """Describe the runs that models come from; one word names their attention, like ``topk-5-times-2``."""
    rows = []
    for model in models:
        if model.training is None or "train_accuracy" not in model.history:
            continue
        label = model.encoder.config.attention_label
        factor = model.encoder.config.inverse_temperature
        rows.append(
            {
                "model": model.path,
                "task": model.training.task_label,
                "attention": label if factor == 1 else f"{label}-times-{factor:g}",
                "kind": model.encoder.config.attention,
                "seed": model.training.seed,
                "setting": json.dumps(_setting(model), sort_keys=True),
                "epochs": model.epoch,
                "planned": model.training.epochs,
                "state": _state(model),
            }
        )
    return RUNS.of_rows(rows)


def setting_in_words(model: LoadedModel) -> str:
    """Return the settings that differ from the defaults, except the attention and those with their own column."""
    chosen = {**_setting(model), "inverse_temperature": model.encoder.config.inverse_temperature}
    unusual = [n for n, value in chosen.items() if n not in _LISTED and _USUAL[n] not in (MISSING, value)]
    return ", ".join(f"{name} {_in_words(chosen[name])}" for name in sorted(unusual)) or "usual"


def _setting(model: LoadedModel) -> dict[str, Any]:
    """Return all choices of architecture and training except the attention and the length of training."""
    setting = {name: value for name, value in model.encoder.config.to_dict().items() if name not in _ATTENTION}
    if model.training is not None:
        training = model.training.to_dict()
        setting |= {name: value for name, value in training.items() if name not in _NOT_A_SETTING}
        setting["task"] = model.training.task_label
    return setting


def _state(model: LoadedModel) -> str:
    assert model.training is not None
    if model.snapshot != "last":  # the initialisation, a named epoch, or the best epoch
        return "snapshot"
    accuracy = model.history["train_accuracy"]
    if not accuracy:
        return NOT_BEGUN
    if model.training.until is not None and accuracy[-1] >= model.training.until:
        return STOPPED
    return FINISHED if len(accuracy) >= model.training.epochs else UNFINISHED


def setting_labels(settings: Sequence[str]) -> dict[str, str]:
    """Label settings by their task and their differences from the others."""
    read = {setting: json.loads(setting) for setting in dict.fromkeys(settings)}
    labels = {}
    for setting, values in read.items():
        # A setting that another task brings, like its vocabulary, need not be named.
        alike = [each for each in read.values() if each["task"] == values["task"]]
        names = [name for name in values if len({json.dumps(each.get(name)) for each in alike}) > 1]
        labels[setting] = ", ".join([values["task"], *(f"{name} {_in_words(values.get(name))}" for name in names)])
    return labels


def _in_words(value: Any) -> str:
    """Return a setting's value as a user types it; ``none`` for an empty list or an unset value."""
    return "none" if value in (None, []) else "+".join(map(str, value)) if isinstance(value, list) else str(value)


def epochs_to(history: pd.DataFrame, target: float = TARGET) -> int | None:
    """Return the first epoch whose training accuracy reaches the target."""
    if "train_accuracy" not in history:
        return None
    at_target = history[history["train_accuracy"] >= target]
    return None if at_target.empty else int(at_target["epoch"].iloc[0])
