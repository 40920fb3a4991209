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

from semdiag_models.archive import CodeError, DamagedError, check_archive, code_in
from semdiag_models.config import ModelConfig, TrainingConfig
from semdiag_models.encoder import Encoder
from semdiag_models.reading import InputError, open_file, require_memory, write_bytes

_DEEPEST = 50  # largest number of levels of nested containers
_SHARED = 10**6  # largest number of values in shared containers, counted at each occurrence


class OddTensorError(Exception):
    """Raised for a kind of tensor that is not read, which the message names."""


def check_plain(content: Any) -> None:
    """Refuse tensors that are not plain dense memory, and containers that cannot be traversed."""
    known: dict[int, tuple[int, int] | None] = {}  # size and height by container; None during its traversal
    seen = 0  # number of values, each counted once

    def follow(content: Any, depth: int) -> tuple[int, int]:
        """Return the number of values, counting shared ones at each occurrence, and the nesting depth."""
        nonlocal seen
        if isinstance(content, Tensor):
            _check_tensor(content)
        if not isinstance(content, Mapping | list | tuple):
            seen += 1
            return 1, 0
        if id(content) not in known:
            known[id(content)] = None
            if not depth:
                raise DamagedError("containers that are nested too deeply")
            values = content.values() if isinstance(content, Mapping) else content
            inner = [(0, 0), *(follow(value, depth - 1) for value in values)]
            size, height = 1 + sum(size for size, _ in inner), 1 + max(height for _, height in inner)
            if height > _DEEPEST:
                raise DamagedError("containers that are nested too deeply")
            if size > _SHARED + 10 * (seen + len(known)):
                raise DamagedError("containers that contain each other too often")
            known[id(content)] = size, height
        if (found := known[id(content)]) is None:
            raise DamagedError("a container that contains itself")
        return found

    follow(content, _DEEPEST)


def _check_tensor(tensor: Tensor) -> None:
    odd = {
        "nested": tensor.is_nested, "meta": tensor.is_meta, "sparse": tensor.layout != torch.strided,
        "quantised": tensor.is_quantized,
    }  # fmt: skip
    if any(odd.values()):
        raise OddTensorError(next(kind for kind, found in odd.items() if found))


FORMAT = "semdiag/1"
OptimizerState = dict[str, dict[str, Tensor]]  # by parameter, then by quantity; empty for plain SGD


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
    # state of the optimiser, by parameter and quantity
    optimizer_state: OptimizerState = field(default_factory=dict)
    recorded_weights: str = field(default="", compare=False)  # hash of the parameters as recorded in the file

    def build(self) -> Encoder:
        """Return the encoder with these parameters, in evaluation mode."""
        model = Encoder(self.model)
        model.load_state_dict(self.state)
        return model.eval()


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write atomically: a temporary file in the same folder, fsync, rename."""
    content = {
        "format": FORMAT,
        "config": {"model": checkpoint.model.to_dict(), "training": checkpoint.training.to_dict()},
        "model_state": {name: t.detach().cpu().contiguous() for name, t in checkpoint.state.items()},
        "epoch": checkpoint.epoch,
        "history": checkpoint.history,
        "rng": {name: t.cpu() for name, t in checkpoint.rng.items()},
        "provenance": checkpoint.provenance,
        "weights_sha256": weights_sha256(checkpoint.state),
    }
    if checkpoint.optimizer_state:
        content["optimizer_state"] = {
            name: {quantity: t.detach().cpu().contiguous() for quantity, t in values.items()}
            for name, values in checkpoint.optimizer_state.items()
        }
    whole = io.BytesIO()  # on a full disk, torch's writer names neither file nor reason
    torch.save(content, whole)
    with whole.getbuffer() as content_bytes:  # else Python 3.13 warns if writing fails
        write_bytes(path, content_bytes)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint written by :func:`write_checkpoint`, trusting nothing in it."""
    content, *_ = _read(path)
    if not is_checkpoint(content):
        raise InputError(
            f"{path} is not a semdiag checkpoint (no format entry {FORMAT!r}). "
            "Make one with: semdiag train even-pairs --attention topk --k 5."
        )
    return checkpoint_of(path, content)


def read_plain(path: Path) -> Any:
    """Read tensors and plain containers from a file; code in it is refused and never run."""
    return read_hashed(path, hashed=False)[0]


def read_hashed(path: Path, hashed: bool = True) -> tuple[Any, str]:
    """Read a file as :func:`read_plain` does, and hash it while it is open."""
    content, wrong, digest = _read(path, hashed)
    if wrong is not None:  # torch can write files without checksums
        warnings.warn(f"{path}: the checksum of {wrong[:80]!r} is wrong; it may be damaged.", stacklevel=3)
    return content, digest


def is_checkpoint(content: Any) -> bool:
    """Return whether content read from a file claims to be a checkpoint of this package."""
    return isinstance(content, dict) and content.get("format") == FORMAT


def _read(path: Path, hashed: bool = False) -> tuple[Any, str | None, str]:
    """Return a file's content, its first member with a wrong checksum, and its hash."""
    content, wrong, digest = _loaded(path, hashed)
    if wrong is not None and is_checkpoint(content):
        raise InputError(f"{path} is damaged: the checksum of {wrong[:80]!r} is wrong. Restore it from a copy.")
    return content, wrong, digest


def _loaded(path: Path, hashed: bool) -> tuple[Any, str | None, str]:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if hashed else ""
        file.seek(0)
        try:
            wrong = check_archive(file)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about pickle protocols: the file is read or refused
                content = torch.load(file, map_location="cpu", weights_only=True)
            check_plain(content)
            return content, wrong, digest
        except CodeError as error:
            raise InputError(_REFUSED.format(path=path, code=error)) from None
        except OddTensorError as error:
            raise InputError(
                f"{path} holds a {error} tensor; only plain ones are read: tensor.to_dense()."
            ) from None
        except DamagedError as error:
            raise InputError(f"{path} is not a checkpoint, or it is truncated ({error}).") from None
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            code = found[1].rstrip(".")[:120] if found else code_in(file)
            if code:
                raise InputError(_REFUSED.format(path=path, code=code)) from None
            raise InputError(f"{path} is not a checkpoint: no readable tensors in it.") from None
        except Exception as error:  # on damaged files torch raises anything
            reason = str(error).split("\n", 1)[0][:120] or type(error).__name__
            raise InputError(f"{path} is not a checkpoint, or it is truncated ({reason}).") from None


_REFUSED = (
    "{path} refused: it holds the code object {code}, and checkpoints are read as data only. Save a state dict of "
    "tensors instead; for a model of your own name a function that builds it: package.module:function."
)


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
    odd = [*(name for name in expected if name not in state), *(name for name in state if name not in expected)]
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
        # A tensor of the right shape may lack memory: on the meta device, or expanded from one number.
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.is_floating_point()
        if not plain or not tensor.is_contiguous():
            raise InputError(f"{path}: parameter {name!r} is not a plain tensor of floating-point numbers.")


def checkpoint_of(path: Path, content: dict[str, Any]) -> Checkpoint:
    """Build a checkpoint from a file's content, trusting nothing in it."""
    content = {"rng": {}, "provenance": {}, "optimizer_state": {}, **content}
    _check_entries(path, content)
    try:
        model = ModelConfig.from_dict(content["config"]["model"])
        training = TrainingConfig.from_dict(content["config"]["training"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    _check_size(path, model, content["model_state"])
    parts = {name: content[name] for name in ("epoch", "history", "rng", "provenance", "optimizer_state")}
    recorded = str(content.get("weights_sha256", ""))[:64]
    return Checkpoint(model, training, content["model_state"], **parts, recorded_weights=recorded)


def _check_entries(path: Path, content: dict[str, Any]) -> None:
    """Refuse a file whose entries are missing, of another kind or out of range."""
    names = ("config", "model_state", "history", "rng", "provenance", "optimizer_state")
    for key, kind in (dict.fromkeys(names, dict) | {"epoch": int}).items():
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
        if column.endswith("accuracy") and not all(0 <= v <= 1 for v in values):  # refuses NaN, too
            raise InputError(f"{path} is damaged: its history {column!r} has a value that is not between 0 and 1.")
    for name, values in content["optimizer_state"].items():
        if not isinstance(values, dict) or not all(isinstance(t, Tensor) for t in values.values()):
            raise InputError(f"{path} is damaged: its optimiser state of {name!r} is not tensors by name.")


def _check_size(path: Path, model: ModelConfig, state: dict[str, Any]) -> None:
    """Refuse parameters that do not fit a configuration, and a model that does not fit into memory."""
    if model.blocks > len(state):  # checked before so many blocks are made
        raise InputError(f"{path} has too few parameters for its configuration's {model.blocks} blocks.")
    with torch.device("meta"):
        skeleton = Encoder(model)
    entries = sum(tensor.numel() for tensor in (*skeleton.parameters(), *skeleton.buffers()))
    # Each number exists in the file, in the model in float64, and twice more while positions are made.
    require_memory(32 * entries, f"{path} declares a model that")
    check_shapes(path, skeleton, state)
