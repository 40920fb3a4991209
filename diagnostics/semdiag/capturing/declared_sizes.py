"""Check that a Hugging Face configuration and its files are of one model, before memory is allocated."""

import json
import math
import os
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from semdiag_models import InputError
from semdiag_models.reading import open_file

_LARGEST_HEADER = 16 * 2**20  # bytes: of 100,000 tensors
_FACTOR, _MORE = 3, 10**7  # tied weights count twice; heads, poolers
_NUMBERS = {"F64", "F32", "F16", "BF16", "C64", "C128", "I64", "BOOL"}  # each a number, or a position
_WHOLE = {"U8", "I16", "U16", "I32", "U32", "U64"}  # packed numbers in weights, masks or places in buffers
_PACKED = "weight", "blocks", "W_q", "qdata", "qzeros"  # in names of packed weights
_FEW = 1000  # layers or labels: never suspicious up to here


class _TooLargeError(Exception):
    """Raised once a model has more parameters than its files can hold."""


def check_sizes(spec: str, config: Any, weights: Sequence[Path], kind: Any) -> None:
    """Refuse a configuration that describes a far larger model than its files hold."""
    held = [shape for path in weights for shape in _shapes(path)]
    elements = sum(map(math.prod, held))
    if not held or not isinstance(config, dict):
        return  # the library says what is wrong
    for name, value in _numbers(config):
        few = len(held) if "layer" in name or "block" in name else elements if name == "num_labels" else None
        if few is not None and value > max(_FEW, few):
            raise InputError(
                f"{spec}: its config.json says {name} = {value:.3g}, but its files hold {len(held):,} tensors "
                f"with {elements:,} numbers. They are not of one model."
            )
    allowed = _FACTOR * elements + _MORE
    made = 0

    def count(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal made
        made += 0 if parameter is None else parameter.numel()
        if made > allowed:
            raise _TooLargeError

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            _build(kind, weights[0].parent)
    except _TooLargeError:
        raise InputError(
            f"{spec}: its config.json describes a model of more than {allowed:,} parameters, but its files hold "
            f"{elements:,} numbers. They are not of one model."
        ) from None
    except Exception:  # loading will report it
        return
    finally:
        hook.remove()


def _build(kind: Any, folder: Path) -> None:
    """Build the model without its weights."""
    import transformers

    auto: Any = transformers.AutoModel
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if kind is auto:
        kind.from_config(config)
    else:
        kind(config)


def quantised_tensor(weights: Sequence[Path]) -> str:
    """Name a tensor of packed or scaled numbers with its declared type; empty if there is none."""
    for path in weights:
        for name, entry in _header(path).items():
            kind, short = str(entry.get("dtype")), name.rsplit(".", 1)[-1]
            if kind not in _NUMBERS and (kind not in _WHOLE or any(part in short for part in _PACKED)):
                return f"{name} of type {kind}"
    return ""


def _shapes(path: Path) -> list[tuple[int, ...]]:
    """Return the shapes that a safetensors header declares; none for a damaged file, which the library reports."""
    try:
        shapes = [tuple(entry["shape"]) for entry in _header(path).values()]
    except (KeyError, TypeError):
        return []
    return shapes if all(map(_is_shape, shapes)) else []


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Return what a safetensors header declares of each tensor; nothing of a damaged file."""
    with open_file(path) as file:
        try:
            header = read_header(path, file)
            header.pop("__metadata__", None)
            return dict(header) if all(isinstance(entry, dict) for entry in header.values()) else {}
        except InputError:
            raise
        except (ValueError, RecursionError, AttributeError, TypeError):
            return {}


def read_header(path: Path, file: BufferedReader) -> Any:
    """Read the header of a safetensors file from its beginning."""
    size = int.from_bytes(file.read(8), "little")
    if size > _LARGEST_HEADER and size < os.fstat(file.fileno()).st_size:
        raise InputError(
            f"{path}: its header has {size:,} bytes; that of a safetensors file has up to {_LARGEST_HEADER:,}."
        )
    if not 0 < size <= _LARGEST_HEADER:
        raise ValueError(f"not a safetensors file: its header would have {size:,} bytes")
    return json.loads(file.read(size))


def _is_shape(shape: tuple[Any, ...]) -> bool:
    """Return whether this is a shape: whole numbers whose product a file can address."""
    return all(type(length) is int and length >= 0 for length in shape) and math.prod(shape) < 2**63


def _numbers(config: dict[str, Any], depth: int = 5) -> list[tuple[str, int]]:
    """Return the whole numbers of a configuration, nested ones included, by name."""
    own = [(name, value) for name, value in config.items() if isinstance(value, int)]
    inner = [value for value in config.values() if isinstance(value, dict)] if depth else []
    return own + [pair for value in inner for pair in _numbers(value, depth - 1)]
