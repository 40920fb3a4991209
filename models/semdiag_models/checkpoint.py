"""Checkpoints: plain dictionaries of tensors, numbers and strings; written whole or not at all."""

import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from semdiag_models.archive import CodeError, DamagedError, check_archive, code_in
from semdiag_models.config import ModelConfig, TrainingConfig
from semdiag_models.encoder import Encoder
from semdiag_models.reading import InputError, layers, open_file, require_memory, write_bytes


def check_plain(content: Any) -> None:
    """Refuse tensors that are not plain dense memory, and containers that cannot be traversed."""
    for layer in layers(content):
        for tensor in layer:
            if isinstance(tensor, Tensor):
                _check_tensor(tensor)


def _check_tensor(tensor: Tensor) -> None:
    odd = {
        "nested": tensor.is_nested, "meta": tensor.is_meta, "sparse": tensor.layout != torch.strided,
        "quantised": tensor.is_quantized,
    }  # fmt: skip
    if any(odd.values()):
        kind = next(kind for kind, found in odd.items() if found)
        raise InputError(f"holds a {kind} tensor; only plain ones are read: tensor.to_dense().")


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
    content = read_plain(path)
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
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if hashed else ""
        file.seek(0)
        try:
            wrong = check_archive(file)
            content = _loaded(file)
        except (DamagedError, InputError) as error:
            raise InputError(f"{path} {error}") from None
    if wrong is not None:  # torch can write files without checksums
        if is_checkpoint(content):
            raise InputError(
                f"{path} is damaged: the checksum of {wrong[:80]!r} is wrong. Restore it from a copy."
            )
        warnings.warn(f"{path}: the checksum of {wrong[:80]!r} is wrong; it may be damaged.", stacklevel=3)
    return content, digest


def _loaded(file: BinaryIO) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: the file is read or refused
            content = torch.load(file, map_location="cpu", weights_only=True)
        check_plain(content)
        return content
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if code := found[1].rstrip(".") if found else code_in(file):
            raise CodeError(code) from None
        raise InputError("is not a checkpoint: no readable tensors in it.") from None
    except Exception as error:  # on damaged files torch raises anything
        raise DamagedError(str(error).split("\n", 1)[0][:120] or type(error).__name__) from None


def is_checkpoint(content: Any) -> bool:
    """Return whether content read from a file claims to be a checkpoint of this package."""
    return isinstance(content, dict) and content.get("format") == FORMAT


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
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        wanted, why = tuple(expected[name].shape), ""
        if shape != wanted:
            why = f" has shape {shape}; its configuration says {wanted}"
        # A tensor of the right shape may lack memory: on the meta device, or expanded from one number.
        elif (
            tensor.layout != torch.strided
            or tensor.device.type != "cpu"
            or not (tensor.is_floating_point() and tensor.is_contiguous())
        ):
            why = " is not a plain tensor of floating-point numbers"
        if why:
            raise InputError(f"{path}: parameter {name!r}{why}.")


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
