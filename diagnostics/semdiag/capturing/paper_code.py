"""Checkpoints of the paper's released code: plain state dicts, configured by their file names."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semdiag_files import InputError
from semdiag_models import Encoder, ModelConfig, find_task
from semdiag_models.checkpoint import check_shapes

_BLOCK = "encoder.transformer.{}."
_MARK = _BLOCK.format(0) + "attention.W_q.weight"
_POSITIONS = "pos_encoder.pe"
# Parameters whose shapes give the model's size, and their number of axes.
_MATRICES = ("embedding.weight", "linear.weight", _BLOCK.format(0) + "ffn.0.weight", _MARK)
_AXES = dict.fromkeys(_MATRICES, 2) | {_POSITIONS: 3}
_MASKS = {"none": "full", "windowed": "banded", "blklocal": "block", "topk": "topk", "botk": "bottomk"}
_RANDOM = "draws its random mask anew in every forward pass, so there is no single model to measure"
# Keys in file names of checkpoints, and the entries of their configuration.
_IN_NAME = {
    "nheads": "n_heads", "mask": "mask_type", "mask_size": "mask_size", "ngtk": "ngtk", "inv_temp": "inv_temp",
    "mlpa": "activation", "seed": "seed", "nocls": "nocls",
}  # fmt: skip


def is_released_code(content: object) -> bool:
    """Return whether a file holds parameters with the names of the paper's released code."""
    return isinstance(content, dict) and _MARK in content


def build_encoder(
    path: Path, state: dict[str, Any], config: Mapping[str, Any] | None
) -> tuple[Encoder, dict[str, Any]]:
    """Build our encoder with the parameters of a released-code checkpoint."""
    entries = _from_name(path.name) | dict(config or {})
    missing = [name for name in ("mask_type", "mask_size", "n_heads") if name not in entries]
    if missing:
        raise InputError(
            f"{path} is a checkpoint of the paper's code, but its name does not say {', '.join(missing)}. "
            "Give them in a JSON file: --config FILE.json."
        )
    _check_tensors(path, state)
    model = _config(path, state, entries)
    renamed = _renamed(path, state, model.blocks)
    encoder = Encoder(model).eval()
    check_shapes(path, encoder, renamed)
    encoder.load_state_dict(renamed)
    encoder.positions.copy_(state[_POSITIONS][0])  # with the paper's rounding, not ours
    seed = entries.get("seed")
    try:
        task = find_task(str(entries.get("task"))).name
    except InputError:
        task = None
    return encoder, {
        "task": None if task == "listops" else task,  # its ids depend on the paper's data
        "seed": seed if isinstance(seed, int) else None,
        "snapshot": "best" if path.stem.endswith("_best") else "unknown",
    }


def _check_tensors(path: Path, state: dict[str, Any]) -> None:
    for name in (*_AXES, *state):
        tensor = state.get(name)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise InputError(f"{path} holds no tensor {name!r}: it is not a whole checkpoint of the paper's code.")
        if tensor.ndim != _AXES.get(name, tensor.ndim) or not tensor.numel():
            shape = tuple(tensor.shape)
            raise InputError(f"{path}: {name!r} has shape {shape}, which does not fit the paper's code.")
    positions = tuple(state[_POSITIONS].shape)
    width = state["embedding.weight"].shape[1]
    if positions != (1, positions[1], width):
        raise InputError(f"{path}: {_POSITIONS!r} has shape {positions}, which does not fit the width {width}.")


def _from_name(name: str) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    stem = re.sub(r"(_best|_last)?\.pt$", "", name)
    task, *pairs = stem.split("__")
    for pair in pairs:
        key, _, value = pair.partition(":")
        if key in _IN_NAME:
            entries[_IN_NAME[key]] = _number(value)
    if pairs:
        entries["task"] = task.split("-")[0]
    return entries


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _config(path: Path, state: dict[str, Any], entries: dict[str, Any]) -> ModelConfig:
    mask = _mask(path, entries)
    heads = entries["n_heads"]
    if not isinstance(heads, int) or heads < 1:
        raise InputError(f"{path}: n_heads must be a positive whole number. Got {heads!r}.")
    cls = str(entries.get("nocls", True)) != "True"
    extra = _global_tokens(path, state, entries, cls)
    embedding = state["embedding.weight"]
    numbers = (re.match(r"encoder\.transformer\.(\d{1,6})\.", str(name)) for name in state)
    values = {
        "vocabulary_size": embedding.shape[0] - extra - cls, "classes": state["linear.weight"].shape[0],
        "length": state[_POSITIONS].shape[1] - extra - cls,
        "attention": _MASKS[mask], "k": None if mask == "none" else entries["mask_size"],
        "blocks": 1 + max(int(match[1]) for match in numbers if match), "width": embedding.shape[1],
        "mlp_width": state[_BLOCK.format(0) + "ffn.0.weight"].shape[0], "heads": heads,
        "head_width": state[_MARK].shape[0] // heads,
        "activation": entries.get("activation", "relu"), "inverse_temperature": entries.get("inv_temp", 1.0),
        "first_norm_eps": 0.0, "pad_as_token": True, "global_tokens": extra,
        "pooling": "cls" if cls else "mean", "cls_as_key": not cls or mask == "none",
    }  # fmt: skip
    try:
        return ModelConfig.from_dict(values)  # checks types too: values come from a name or JSON
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _mask(path: Path, entries: dict[str, Any]) -> str:
    mask = "none" if entries["mask_size"] == -1 else str(entries["mask_type"])
    if mask not in _MASKS:
        why = _RANDOM if mask == "rnd" else f"uses mask {mask!r}"
        raise InputError(f"{path} {why}. Supported are the masks {', '.join(_MASKS)}.")
    return mask


def _global_tokens(path: Path, state: dict[str, Any], entries: dict[str, Any], cls: bool) -> int:
    extra = entries.get("ngtk", 0)
    ids = min(state["embedding.weight"].shape[0], state[_POSITIONS].shape[1])
    if not isinstance(extra, int) or not 0 <= extra < ids:
        raise InputError(f"{path}: ngtk must be a number of global tokens, less than {ids}. Got {extra!r}.")
    if cls and extra:
        raise InputError(f"{path} has CLS and {extra} global tokens, which the paper's code refuses together.")
    return extra


def _renamed(path: Path, state: dict[str, Any], blocks: int) -> dict[str, Tensor]:
    try:
        ours = {"embedding.weight": state["embedding.weight"]}
        for part in ("weight", "bias"):
            ours[f"head.{part}"] = state[f"linear.{part}"]
            for i in range(blocks):
                theirs = _BLOCK.format(i)
                block = f"blocks.{i}."
                projections = [state[f"{theirs}attention.W_{x}.{part}"] for x in "qkv"]
                ours[f"{block}attention.qkv.{part}"] = torch.cat(projections)
                ours[f"{block}attention.out.{part}"] = state[f"{theirs}attention.W_o.{part}"]
                ours[f"{block}expand.{part}"] = state[f"{theirs}ffn.0.{part}"]
                ours[f"{block}contract.{part}"] = state[f"{theirs}ffn.3.{part}"]
    except KeyError as error:
        why = f"lacks parameter {error}: it is not a whole checkpoint of the paper's code"
        raise InputError(f"{path} {why}.") from None
    except RuntimeError:
        raise InputError(f"{path}: the shapes of its W_q, W_k and W_v do not fit each other.") from None
    return ours
