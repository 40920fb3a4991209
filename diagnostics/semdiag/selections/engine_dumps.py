"""Queries, keys and routed experts that inference engines wrote to files, read without the engine."""

import base64
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from semdiag.selections.arrays import read_arrays
from semdiag_models import InputError
from semdiag_models.checkpoint import read_plain
from semdiag_models.reading import read_json


class DumpedLayer(NamedTuple):
    """Queries and keys of one pass of one layer, as :func:`semdiag.row_statistics` takes them, causal."""

    module: str  # dotted name in the engine's model
    layer: int  # number in the engine's model
    q: Tensor  # (1, H, Lq, D), the queries of the last Lq tokens
    k: Tensor  # (1, Hk, Lk, D)
    scale: float  # factor on their products
    first_query: int  # position of query 0 among the keys


def read_queries_and_keys(path: str | Path) -> list[DumpedLayer]:
    """Read the queries and keys that vLLM-Hook (probe_hookqk_worker.py) wrote into ``qk.pt``, of one rank."""
    content = read_plain(Path(path))
    try:
        config, read = content["config"], []
        heads, shared, width = (int(config[n]) for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        scale = float(config.get("attention_multiplier", width**-0.5))
        for name, entry in content["qk_cache"].items():
            for rows, keys in zip(entry["q"], entry["k_all"], strict=True):
                q, k = _by_head(rows, heads, width), _by_head(keys, shared, width)
                read.append(DumpedLayer(name, int(entry["layer_num"]), q, k, scale, k.shape[2] - q.shape[2]))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise InputError(f"{path} is no dump of vLLM-Hook: {type(error).__name__} {error}.") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    numbers = sorted({each.layer for each in read})
    if not numbers or shared < 1 or heads % shared or not 0 < scale < math.inf:
        raise InputError(f"{path} holds no layer, no scale, or heads that share no keys: {heads} and {shared}.")
    step = math.gcd(*(b - a for a, b in pairwise(numbers))) or 1
    if missing := {*range(numbers[0], numbers[-1], step)} - {*numbers}:
        raise InputError(f"{path} lacks layer {min(missing)} between {numbers[0]} and {numbers[-1]}.")
    if any(each.first_query < 0 for each in read):
        raise InputError(f"{path} has more queries than keys: are q and k swapped?")
    return read


def _by_head(rows: Any, heads: int, width: int) -> Tensor:
    """Return (tokens, heads · width), or the last token's (heads · width,), as (1, heads, tokens, width)."""
    rows = rows[None] if isinstance(rows, Tensor) and rows.ndim == 1 else rows
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != heads * width or not len(rows):
        got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{heads} heads of width {width} need tensors (tokens, {heads * width}). Got {got}.")
    return rows.view(1, len(rows), heads, width).transpose(1, 2)


def read_routed_experts(path: str | Path, layers: int | None = None, k: int | None = None) -> Tensor:
    """Read which experts (or keys) an engine chose, (tokens, layers, k) int64, for ``semdiag selections``.

    vLLM (#28284): ``RequestOutput.outputs[0].routed_experts`` in an .npz or .safetensors. SGLang (#12162):
    ``meta_info["routed_experts"]`` or ``["indexer_topk"]`` of a response (.json), base64 of int32; name ``layers``
    and ``k``. Megatron: ``RouterReplay.get_recorded_data()``, a list by layer of (tokens, k), in a .pt.
    """
    path = Path(path)
    if path.suffix == ".json":
        return _from_base64(path, layers, k)
    content = read_plain(path) if path.suffix == ".pt" else read_arrays(path, ["routed_experts"])
    content = content.get("routed_experts") if isinstance(content, Mapping) else content
    if isinstance(content, list | tuple):
        if empty := [at for at, each in enumerate(content) if not isinstance(each, Tensor)]:
            raise InputError(f"{path}: layer {empty[0]} was not recorded.")
        if len({each.shape for each in content}) != 1:
            raise InputError(f"{path}: its layers differ in size, or there are none.")
        content = torch.stack(list(content), 1)
    if not isinstance(content, Tensor) or content.ndim != 3 or content.is_floating_point():
        raise InputError(f"{path} holds no routed_experts: whole numbers (tokens, layers, k).")
    got = tuple(content.shape)
    if layers not in (None, got[1]) or k not in (None, got[2]):
        raise InputError(f"{path} has the shape {got}, not (tokens, {layers}, {k}): are axes swapped?")
    return content.long()


def _from_base64(path: Path, layers: int | None, k: int | None) -> Tensor:
    content = read_json(path)
    content = content.get("meta_info", content) if isinstance(content, dict) else {}
    text = next((content[name] for name in ("routed_experts", "indexer_topk") if name in content), None)
    if not isinstance(text, str) or layers is None or k is None or min(layers, k) < 1:
        raise InputError(f"{path}: routed_experts are a text in base64, whose layers and k must be named.")
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4").astype(np.int64)
        return torch.from_numpy(numbers.reshape(-1, layers, k))
    except ValueError:
        raise InputError(f"{path}: routed_experts are no int32 in base64, {layers} layers by {k}.") from None
