"""Checkpoints: plain dictionaries of tensors, numbers and strings; written whole or not at all."""

import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semdiag_files import InputError, layers, open_file, require_memory, write_bytes
from semdiag_files.archive import check_archive, code_in, damaged, holding_code
from semdiag_models.config import ModelConfig, TrainingConfig
from semdiag_models.model import Encoder

FORMAT = "semdiag/1"


def check_plain(content: Any) -> None:
    """Refuse tensors that are not plain dense memory, and containers that cannot be traversed."""
    for t in (t for layer in layers(content) for t in layer if isinstance(t, Tensor)):
        sparse = t.layout != torch.strided
        kinds = ("nested", t.is_nested), ("meta", t.is_meta), ("sparse", sparse), ("quantised", t.is_quantized)
        for kind, present in kinds:
            if present:
                raise InputError(f"holds a {kind} tensor; only plain ones are read: tensor.to_dense().")


@dataclass
class Checkpoint:
    """One snapshot of one run."""

    model: ModelConfig  # architecture
    training: TrainingConfig  # data and optimisation of the run
    state: dict[str, Tensor]  # parameters by name
    epoch: int  # number of finished epochs; 0 is the initialisation
    # one list per column (``epoch``, ``train_accuracy``, …), one entry per finished epoch
    history: dict[str, list[float]]
    # states of the random generators after that epoch, by device; empty in snapshots that cannot be resumed from
    rng: dict[str, Tensor] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)  # versions, command, device, threads
    # state of the optimiser, by parameter, then by quantity; empty for plain SGD
    optimizer_state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    recorded_weights: str = field(default="", compare=False)  # hash of the parameters as recorded in the file

    def build(self) -> Encoder:
        """Return the encoder with these parameters, in evaluation mode."""
        model = Encoder(self.model)
        model.load_state_dict(self.state)
        return model.eval()


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write atomically: a temporary file in the same folder, fsync, rename."""

    def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}

    content = {
        "format": FORMAT,
        "config": {"model": checkpoint.model.to_dict(), "training": checkpoint.training.to_dict()},
        "model_state": plain(checkpoint.state),
        "epoch": checkpoint.epoch,
        "history": checkpoint.history,
        "rng": plain(checkpoint.rng),
        "provenance": checkpoint.provenance,
        "weights_sha256": weights_sha256(checkpoint.state),
    }
    if checkpoint.optimizer_state:
        content["optimizer_state"] = {name: plain(values) for name, values in checkpoint.optimizer_state.items()}
    buffer = io.BytesIO()  # on a full disk, torch's writer names neither file nor reason
    torch.save(content, buffer)
    with buffer.getbuffer() as content_bytes:  # else Python 3.13 warns if writing fails
        write_bytes(path, content_bytes)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint written by :func:`write_checkpoint`, trusting nothing in it."""
    content, *_ = _read(path)
    if not is_checkpoint(content):
        way = "Make one with: semdiag train even-pairs --attention topk --k 5."
        raise InputError(f"{path} is not a semdiag checkpoint (no format entry {FORMAT!r}). {way}")
    return checkpoint_of(path, content)


def read_plain(path: Path) -> Any:
    """Read tensors and plain containers from a file; code in it is refused and never run."""
    return read_hashed(path)[0]


def read_hashed(path: Path) -> tuple[Any, str]:
    """Read a file as :func:`read_plain` does, and hash it while it is open."""
    content, digest, wrong = _read(path)
    if wrong is not None:  # torch can write files without checksums
        warnings.warn(f"{path}: the checksum of {wrong[:80]!r} is wrong; it may be damaged.", stacklevel=3)
    return content, digest


def is_checkpoint(content: Any) -> bool:
    """Return whether content read from a file claims to be a checkpoint of this package."""
    return isinstance(content, dict) and content.get("format") == FORMAT


def _read(path: Path) -> tuple[Any, str, str | None]:
    """Return a file's content, its hash, and its first member with a wrong checksum."""
    with open_file(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols: the file is read or refused
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            wrong = check_archive(file)
            content = torch.load(file, map_location="cpu", weights_only=True)
            check_plain(content)
        except InputError as error:
            raise InputError(f"{path} {error}") from None
        except pickle.UnpicklingError as error:
            match = re.search(r"GLOBAL (\S+)", str(error))
            code = match[1].rstrip(".") if match else code_in(file)
            why = holding_code(code) if code else "is not a checkpoint: no readable tensors in it."
            raise InputError(f"{path} {why}") from None
        except Exception as error:  # on damaged files torch raises anything
            why = str(error).split("\n", 1)[0][:120] or type(error).__name__
            raise InputError(f"{path} {damaged(why)}") from None
    if wrong is not None and is_checkpoint(content):
        raise InputError(f"{path} is damaged: the checksum of {wrong[:80]!r} is wrong. Restore it from a copy.")
    return content, digest, wrong


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the weights alone: every tensor's name, dtype, shape and bytes, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_shapes(path: Path, model: Encoder, state: dict[str, Any]) -> None:
    """Refuse parameters that do not fit the model."""
    expected = model.state_dict()
    for name in [*expected, *state]:
        if name not in expected or name not in state:
            kind = "lacks" if name in expected else "has the unexpected"
            raise InputError(f"{path} {kind} parameter {name!r}: it does not fit its configuration.")
    for name, t in state.items():
        shape = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        right_shape = tuple(expected[name].shape)
        where = f"{path}: parameter {name!r}"
        if shape != right_shape:
            raise InputError(f"{where} has shape {shape}; its configuration says {right_shape}.")
        # a tensor of the right shape may lack memory: on the meta device, or expanded from one number
        plain = (
            t.layout == torch.strided and t.device.type == "cpu" and t.is_floating_point() and t.is_contiguous()
        )
        if not plain:
            raise InputError(f"{where} is not a plain tensor of floating-point numbers.")


def checkpoint_of(path: Path, content: dict[str, Any]) -> Checkpoint:
    """Build a checkpoint from a file's content, trusting nothing in it."""
    content = {"rng": {}, "provenance": {}, "optimizer_state": {}, **content}
    _check_entries(path, content)
    state = content["model_state"]
    try:
        model = ModelConfig.from_dict(content["config"]["model"])
        training = TrainingConfig.from_dict(content["config"]["training"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if model.blocks > len(state):  # checked before so many blocks are made
        raise InputError(f"{path} has too few parameters for its configuration's {model.blocks} blocks.")
    with torch.device("meta"):
        skeleton = Encoder(model)
    entries = sum(tensor.numel() for tensor in (*skeleton.parameters(), *skeleton.buffers()))
    # each number exists in the file, in the model in float64, and twice more while positions are made
    require_memory(32 * entries, f"{path} declares a model that")
    check_shapes(path, skeleton, state)
    parts = {name: content[name] for name in ("epoch", "history", "rng", "provenance", "optimizer_state")}
    recorded = str(content.get("weights_sha256", ""))[:64]
    return Checkpoint(model, training, state, **parts, recorded_weights=recorded)


def _check_entries(path: Path, content: dict[str, Any]) -> None:
    def check(right: bool, what: str) -> None:
        if not right:
            raise InputError(f"{path} is damaged: its {what}.")

    names = ("config", "model_state", "history", "rng", "provenance", "optimizer_state")
    for key, kind in (dict.fromkeys(names, dict) | {"epoch": int}).items():
        check(isinstance(content.get(key), kind), f"entry {key!r} is missing or not a {kind.__name__}")
    for key in ("model", "training"):
        check(isinstance(content["config"].get(key), dict), f"config entry {key!r} is missing or not a dict")
    check(content["epoch"] >= 0, "epoch is negative")
    for column, values in content["history"].items():
        numbers = isinstance(values, list) and all(isinstance(v, int | float) for v in values)
        check(numbers, f"history {column!r} is not a list of numbers")
        check(len(values) == content["epoch"], f"history {column!r} does not end at its epoch")
        share = not column.endswith("accuracy") or all(0 <= v <= 1 for v in values)  # no NaN, either
        check(share, f"history {column!r} has a value that is not between 0 and 1")
    for name, values in content["optimizer_state"].items():
        tensors = isinstance(values, dict) and all(isinstance(t, Tensor) for t in values.values())
        check(tensors, f"optimiser state of {name!r} is not tensors by name")
