"""Checkpoints: plain dictionaries of tensors, numbers and strings; written whole or not at all."""

import hashlib
import io
import os
import pickle
import pickletools
import re
import tempfile
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semdiag_models.encoder import Encoder
from semdiag_models.errors import InputError
from semdiag_models.model_config import ModelConfig
from semdiag_models.optimization import OptimizerState
from semdiag_models.training_config import TrainingConfig

FORMAT = "semdiag/1"


@dataclass
class Checkpoint:
    """One snapshot of one run.

    Attributes:
        model: the architecture.
        training: data and optimisation of the run.
        state: parameters by name.
        epoch: finished epochs; 0 is the initialisation.
        history: one list per column (``epoch``, ``train_accuracy``, …), one entry per finished epoch.
        rng: states of the random generators after that epoch, by device; empty in snapshots not to resume from.
        provenance: versions, command, device, threads.
        optimizer_state: what the optimiser remembers, by parameter and quantity; empty for plain SGD and in
            snapshots not to resume from.
    """

    model: ModelConfig
    training: TrainingConfig
    state: dict[str, Tensor]
    epoch: int
    history: dict[str, list[float]]
    rng: dict[str, Tensor] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    optimizer_state: OptimizerState = field(default_factory=dict)

    def build(self) -> Encoder:
        """Return the encoder with these parameters, in evaluation mode."""
        model = Encoder(self.model)
        model.load_state_dict(self.state)
        return model.eval()


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write atomically: a temporary file in the same folder, fsync, rename.

    Args:
        path: the file to make or replace.
        checkpoint: what to write.

    Raises:
        OSError: if the folder cannot be written to; an existing file is then unchanged.
    """
    content = {
        "format": FORMAT,
        "config": {"model": checkpoint.model.to_dict(), "training": checkpoint.training.to_dict()},
        "model_state": {name: t.detach().cpu().contiguous() for name, t in checkpoint.state.items()},
        "epoch": checkpoint.epoch,
        "history": checkpoint.history,
        "rng": {name: t.cpu() for name, t in checkpoint.rng.items()},
        "provenance": checkpoint.provenance,
    }
    if checkpoint.optimizer_state:
        content["optimizer_state"] = {
            name: {quantity: t.detach().cpu().contiguous() for quantity, t in values.items()}
            for name, values in checkpoint.optimizer_state.items()
        }
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint written by :func:`write_checkpoint`, trusting nothing in it.

    Args:
        path: the file.

    Returns:
        The checkpoint, parameters on the CPU, shapes checked against the configuration.

    Raises:
        InputError: if the file is missing, not a checkpoint, damaged, holds code, or does not fit its own
            configuration.
    """
    content = read_plain(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(
            f"{path} is not a semdiag checkpoint (no format entry {FORMAT!r}). "
            "Make one with: semdiag train even-pairs --attention topk --k 5."
        )
    return _checkpoint(path, content)


def read_plain(path: Path) -> Any:
    """Read tensors and plain containers from a file; code in it is refused and never run.

    Args:
        path: a file written by ``torch.save``.

    Returns:
        What the file holds.

    Raises:
        InputError: if the file is missing, unreadable, damaged, or holds anything but data; the message
            names the refused global.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: the file is read, or it is refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, not a checkpoint file.") from None
    except PermissionError:
        raise InputError(f"{path} cannot be read: permission denied.") from None
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        code = found[1].rstrip(".") if found else _foreign_global(path)
        if code:
            raise InputError(
                f"{path} refused: it holds the code object {code}, and checkpoints are read as data "
                "only. Save a state dict of tensors instead."
            ) from None
        raise InputError(f"{path} is not a checkpoint: no readable tensors in it.") from None
    except Exception as error:  # on damaged files torch raises whatever its reader stumbles over
        reason = str(error).split("\n", 1)[0][:120] or type(error).__name__
        raise InputError(f"{path} is not a checkpoint, or it is truncated ({reason}).") from None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_shapes(path: Path, model: Encoder, state: dict[str, Any]) -> None:
    """Refuse parameters that do not fit the model.

    Args:
        path: named in the message.
        model: what the parameters are for.
        state: parameters by name.

    Raises:
        InputError: on the first parameter that is missing, extra, misshapen or not plain numbers.
    """
    expected = model.state_dict()
    odd = [
        *(name for name in expected if name not in state),
        *(name for name in state if name not in expected),
    ]
    if odd:
        kind = "lacks" if odd[0] in expected else "has the unexpected"
        raise InputError(f"{path} {kind} parameter {odd[0]!r}: it does not fit its configuration.")
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.shape != expected[name].shape:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(
                f"{path}: parameter {name!r} has shape {shape}; its configuration says "
                f"{tuple(expected[name].shape)}."
            )
        # The right shape may still be without memory: on the meta device, or expanded from one number.
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.is_floating_point()
        if not plain or not tensor.is_contiguous():
            raise InputError(f"{path}: parameter {name!r} is not a plain tensor of floating-point numbers.")


def _foreign_global(path: Path) -> str | None:
    """Name the first global, not torch's own, in a pickle of a protocol that torch does not read."""
    try:
        data = path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                data = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
        stream = io.BytesIO(data)
        strings: list[str] = []  # a STACK_GLOBAL is preceded by the strings module and name
        while True:  # torch's older format is several pickles in a row
            for opcode, argument, _ in pickletools.genops(stream):
                name = None
                if opcode.name == "GLOBAL":
                    name = str(argument).replace(" ", ".")
                elif opcode.name == "STACK_GLOBAL":
                    name = ".".join(strings[-2:])
                elif isinstance(argument, str):
                    strings.append(argument)
                if name and not name.startswith(("torch.", "collections.OrderedDict")):
                    return " ".join(name.split())[:120]
    except Exception:  # the end of the pickles, or never one
        return None


def _checkpoint(path: Path, content: dict[str, Any]) -> Checkpoint:
    content = {"rng": {}, "provenance": {}, "optimizer_state": {}, **content}
    names = ("config", "model_state", "history", "rng", "provenance", "optimizer_state")
    kinds = dict.fromkeys(names, dict) | {"epoch": int}
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise InputError(f"{path} is damaged: its entry {key!r} is missing or not a {kind.__name__}.")
    for key in ("model", "training"):
        if not isinstance(content["config"].get(key), dict):
            raise InputError(f"{path} is damaged: its config entry {key!r} is missing or not a dict.")
    if content["epoch"] < 0:
        raise InputError(f"{path} is damaged: its epoch is negative.")
    for column, values in content["history"].items():
        if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
            raise InputError(f"{path} is damaged: its history {column!r} is not a list of numbers.")
        if len(values) != content["epoch"]:
            raise InputError(f"{path} is damaged: its history {column!r} does not end at its epoch.")
    for name, values in content["optimizer_state"].items():
        if not isinstance(values, dict) or not all(isinstance(t, Tensor) for t in values.values()):
            raise InputError(f"{path} is damaged: its optimiser state of {name!r} is not tensors by name.")
    try:
        model = ModelConfig.from_dict(content["config"]["model"])
        training = TrainingConfig.from_dict(content["config"]["training"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if model.blocks > len(content["model_state"]):  # seen before so many are made
        raise InputError(f"{path} has too few parameters for its configuration's {model.blocks} blocks.")
    with torch.device("meta"):
        skeleton = Encoder(model)
    check_shapes(path, skeleton, content["model_state"])
    return Checkpoint(
        model=model,
        training=training,
        state=content["model_state"],
        epoch=content["epoch"],
        history=content["history"],
        rng=content.get("rng", {}),
        provenance=content.get("provenance", {}),
        optimizer_state=content["optimizer_state"],
    )
