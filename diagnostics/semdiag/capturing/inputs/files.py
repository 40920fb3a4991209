"""Read the inputs that a user names."""

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing import batches
from semdiag.capturing.batches import Batch
from semdiag.capturing.inputs.texts import (
    AS_THEY_ARE,
    SUFFIXES,
    TextOptions,
    read_texts,
    text_batches,
    tokeniser_of,
)
from semdiag.capturing.loading import LoadedModel
from semdiag_models import InputError
from semdiag_models.checkpoint import read_plain
from semdiag_models.reading import check_packed, open_file, require_memory

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_inputs(path: Path) -> Tensor:
    """Read token ids from a file."""
    content = _read(path)
    tokens = content.get("tokens") if isinstance(content, dict) else content
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not tokens.numel() or not _whole(tokens):
        what = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"{path} must hold whole token ids of shape (N, L), at least one. Got {what}.")
    require_memory(8 * tokens.numel(), f"{path}, as token ids,")
    ids = tokens.long()
    if tokens.dtype == torch.uint64 and (ids < 0).any():
        raise InputError(f"{path} holds the token id {int(ids.min()) + 2**64}; token ids must be below 2^63.")
    return ids


def read_batches(path: Path, model: LoadedModel, size: int, texts: TextOptions = AS_THEY_ARE) -> list[Batch]:
    """Read inputs for a model of any kind."""
    if path.suffix in SUFFIXES:
        return text_batches(path, model, size, texts)
    if texts != AS_THEY_ARE:
        raise InputError(
            f"--max-length, --tokenizer and --labels are for texts (.txt, .jsonl). Got {path}. Of other inputs, "
            "semdiag.k_sweep(…, labels=…) takes labels, in Python."
        )
    content = _read(path)
    if isinstance(content, Mapping) and set(content) == {"tokens"}:
        content = content["tokens"]
    split = batches.split(content, size)
    if not split:
        raise InputError(f"{path} holds no sample.")
    return split


def cut_texts(path: Path, model: LoadedModel, first: int, texts: TextOptions) -> tuple[int, int | None]:
    """Count the texts that :func:`read_batches` cut because they are too long for the model."""
    tokenise = tokeniser_of(path, model, texts)
    return tokenise.cut(read_texts(path).texts[:first]), tokenise.longest


def _read(path: Path) -> Any:
    if path.suffix == ".pt":
        content = read_plain(path)
        _check_memory(path, content)
        return content
    if path.suffix in (".npy", ".npz"):
        return _read_numpy(path)
    as_array = f'numpy.save("{path.stem}.npy", numpy.loadtxt("{path.name}", delimiter=",", dtype=int))'
    raise InputError(
        "Inputs come as .npy, .npz or .pt token ids of shape (N, L), or as .txt or .jsonl for hf: models and "
        f"models of text. Got {path.name}."
        + f" A table becomes an array with: {as_array}."
        * (path.suffix == ".csv")
    )


def _whole(tokens: Tensor) -> bool:
    plain = tokens.layout == torch.strided and not tokens.is_meta
    return plain and not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)


def _read_numpy(path: Path) -> Tensor:
    try:
        with open_file(path) as file:
            packed = zipfile.is_zipfile(file)
            file.seek(0)
            if not packed:
                check_header(path, file)
                file.seek(0)
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return array_tensor(path, content)
            names = content.files
            if not names:
                raise InputError(f"{path} holds no array. Write one with: numpy.savez(FILE, tokens=ARRAY).")
            name = "tokens" if "tokens" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise InputError(f"{path} holds {', '.join(names)}: name one of them tokens.")
            member = content.zip.getinfo(name if name in content.zip.namelist() else f"{name}.npy")
            check_member(path, member)
            with content.zip.open(member) as array:
                check_header(path, array)
            return array_tensor(path, content[name])
    except InputError:
        raise
    except Exception as error:  # on damaged files numpy raises anything
        reason = str(error).split("\n", 1)[0][:120] or type(error).__name__
        raise InputError(f"{path} cannot be read as an array of numbers ({reason}).") from None


def array_tensor(path: Path, array: "np.ndarray[Any, Any]") -> Tensor:
    """Return the tensor of an array, whatever its byte order."""
    try:
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(array if array.flags.writeable else array.copy())  # torch warns of the others
    except TypeError:
        raise InputError(f"{path} cannot be read as an array of numbers (it holds {array.dtype}).") from None


def _check_memory(path: Path, content: Any) -> None:
    """Refuse tensors larger than memory: a file of a kilobyte may expand to 10¹² numbers."""
    for batch in content if isinstance(content, list | tuple) else (content,):
        if isinstance(batch, Tensor | Mapping | list | tuple):
            for tensor in batches.tensors(batch):
                size = tensor.numel() * tensor.element_size()
                require_memory(size, f"{path}: a tensor of shape {tuple(tensor.shape)}")


def check_member(path: Path, member: zipfile.ZipInfo) -> None:
    """Refuse an archive member that exceeds memory, or is compressed beyond belief."""
    check_packed(path, member.file_size, member.compress_size)


def check_header(path: Path, file: IO[bytes]) -> None:
    """Refuse an array whose header declares more than memory holds, before it is allocated."""
    read = _HEADERS.get(np.lib.format.read_magic(file))
    if read is not None:  # else numpy says what is wrong
        shape, _, kind = read(file)
        require_memory(math.prod(shape) * kind.itemsize, f"{path}: an array of shape {shape}")
