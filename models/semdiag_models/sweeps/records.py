"""Small files that outlive a sweep's runs: what was trained, its history, and a hash of the result."""

import json
import math
import shlex
from pathlib import Path

from semdiag_models.checkpoint import Checkpoint, weights_sha256
from semdiag_models.errors import InputError
from semdiag_models.model_config import ModelConfig
from semdiag_models.reading import read_json
from semdiag_models.sweeps.grid import SweepRun, identity
from semdiag_models.sweeps.packed_records import read_packed
from semdiag_models.training import HISTORY_COLUMNS
from semdiag_models.training_config import TrainingConfig
from semdiag_models.writing import write_text

SCHEMA = "semdiag.run/1"
_DIGITS = 7  # significant digits in a history: float32 has no more


def write_record(folder: Path, run: SweepRun, saved: Checkpoint) -> None:
    """Write a finished run's record, ``NAME.json``, whole or not at all."""
    content = {
        "schema": SCHEMA,
        "run": run.name,
        "model": saved.model.to_dict(),
        "training": saved.training.to_dict(),
        "epochs": saved.epoch,
        "weights": weights_sha256(saved.state),
        "provenance": {
            name: _without_folders(value) if name == "command" else value
            for name, value in saved.provenance.items()
        },
        "history": {name: [_short(value) for value in values] for name, values in saved.history.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{run.name}.json", json.dumps(content, allow_nan=False) + "\n")


def _without_folders(command: str) -> str:
    """Reduce absolute paths in a command, also after ``--option=``, to their last parts."""
    words = []
    for word in shlex.split(command):
        option, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        words.append(f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}")
    return shlex.join(words)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def read_history(folder: Path, run: SweepRun) -> dict[str, list[float]] | None:
    """Read the history from a run's record: its file, or the tables of a finished study."""
    path = folder / f"{run.name}.json"
    content = read_json(path) if path.exists() else read_packed(folder, run.name)
    if content is None:
        return None
    try:
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}")
        training = TrainingConfig.from_dict(content["training"])
        model = ModelConfig.from_dict(content["model"])
        history: dict[str, list[float]] = content["history"]
        whole = set(history) == set(HISTORY_COLUMNS) and len({len(column) for column in history.values()}) == 1
        if not whole or not all(_is_number(value) for column in history.values() for value in column):
            raise ValueError("its history is not a list of numbers per quantity")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no record of a run: {error}. Move it away to train the run again.") from None
    if identity(model, training) != identity(run.model, run.training):
        raise InputError(f"{path} is the record of another configuration. Move it away.")
    return history


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
