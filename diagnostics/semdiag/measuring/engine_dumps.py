"""Queries, keys and routed experts that inference engines wrote to files, read without the engine."""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semdiag.measuring.measurements import read_arrays
from semdiag_models import InputError
from semdiag_models.checkpoint import read_plain
from semdiag_models.reading import read_json


@dataclass(frozen=True, eq=False)
class DumpedLayer:
    """Queries and keys of one pass of one layer, as :func:`semdiag.row_statistics` takes them.

    Attributes:
        module: name of the module in the engine's model.
        layer: number of the layer in the engine's model.
        q: (1, H, Lq, D) queries, the last Lq of the tokens.
        k: (1, Hk, Lk, D) keys.
        scale: factor on their products.
        first_query: position of query 0 among the keys: ``row_statistics(…, causal=True, first_query=…)``.
    """

    module: str
    layer: int
    q: Tensor
    k: Tensor
    scale: float
    first_query: int


def read_queries_and_keys(path: str | Path) -> list[DumpedLayer]:
    """Read what vLLM-Hook wrote, queries and keys: ``qk.pt``, or ``qk.safetensors`` with ``qk.json`` beside it.

    Source: IBM/vLLM-Hook, vllm_hook_plugins/vllm_hook_plugins/workers/probe_hookqk_worker.py (``config`` and, by
    module in ``qk_cache``, lists q and k_all of (tokens, heads · width), and layer_num) and
    mia/graph/artifact_writer.py (qk.safetensors, padded; lengths in qk.json). Deviation: of safetensors, the form
    ``compact_all_tokens`` is refused; shards of tensor parallelism (tp_rank_N) are read one by one.

    Args:
        path: the file.

    Returns:
        One entry per pass and layer, passes of a layer in their order.

    Raises:
        InputError: if the file is missing or damaged, holds another layout, lacks layers between others, or if
            tensors do not fit the heads that its configuration names.
    """
    path = Path(path)
    content = read_plain(path) if path.suffix == ".pt" else _padded_dump(path)
    try:
        config, cache = content["config"], content["qk_cache"]
        heads, shared, width = (int(config[n]) for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        scale = float(config.get("attention_multiplier", width**-0.5))
        passes = [
            (str(name), int(entry["layer_num"]), q, k)
            for name, entry in cache.items()
            for q, k in zip(entry["q"], entry["k_all"], strict=True)
        ]
        read = [
            DumpedLayer(name, layer, _by_head(q, heads, width), _by_head(k, shared, width), scale, 0)
            for name, layer, q, k in passes
        ]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path} is no dump of vLLM-Hook: it lacks {error}.") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    numbers = sorted({each.layer for each in read})
    if not numbers or heads % shared or not (math.isfinite(scale) and scale > 0):
        raise InputError(f"{path} holds no layer, or heads that do not share keys: {heads} and {shared}.")
    if missing := sorted({*range(numbers[0], numbers[-1], _step(numbers))} - {*numbers}):
        raise InputError(
            f"{path} lacks layers {', '.join(map(str, missing))} between {numbers[0]} and {numbers[-1]}."
        )
    if any(each.q.shape[2] > each.k.shape[2] for each in read):
        raise InputError(f"{path} has more queries than keys: are q and k swapped?")
    return [
        DumpedLayer(each.module, each.layer, each.q, each.k, scale, each.k.shape[2] - each.q.shape[2])
        for each in read
    ]


def _step(numbers: Sequence[int]) -> int:
    """Return the distance of layers where only every second or third attends."""
    return math.gcd(*(b - a for a, b in pairwise(numbers))) or 1


def _by_head(rows: Any, heads: int, width: int) -> Tensor:
    """Return (tokens, heads · width), or the last token's (heads · width,), as (1, heads, tokens, width)."""
    rows = rows[None] if isinstance(rows, Tensor) and rows.ndim == 1 else rows
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != heads * width or not len(rows):
        got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{heads} heads of width {width} need tensors (tokens, {heads * width}). Got {got}.")
    return rows.view(1, len(rows), heads, width).transpose(1, 2)


def _padded_dump(path: Path) -> dict[str, Any]:
    """Return a dump of padded tensors as one of lists."""
    meta = read_json(path.with_suffix(".json"))
    try:
        if meta.get("compact_all_tokens"):
            raise InputError(f"{path} is in the form compact_all_tokens: write .pt files (MIA_USE_SAFETENSORS=0).")
        order, cache = meta["layer_order"], {}
        arrays = read_arrays(path, [item[key] for item in order for key in ("key_q", "key_k")])
        for item in order:
            q, k = arrays[item["key_q"]], arrays[item["key_k"]]
            entry = {"layer_num": item["layer_num"], "k_all": _cut(k, meta.get("k_seq_lens"))}
            cache[item["module_name"]] = entry | {"q": _cut(q, meta.get("q_seq_lens")) if q.ndim == 3 else list(q)}
        return {"config": meta["config"], "qk_cache": cache}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path.with_suffix('.json')} is no index of a dump of vLLM-Hook: it lacks {error}."
        ) from None


def _cut(padded: Tensor, lengths: Sequence[int] | None) -> list[Tensor]:
    return [rows if lengths is None else rows[: int(lengths[at])] for at, rows in enumerate(padded)]


def read_routed_experts(path: str | Path, layers: int | None = None, k: int | None = None) -> Tensor:
    """Read which experts (or keys) an engine chose for each token and layer, for ``semdiag selections``.

    vLLM: ``RequestOutput.outputs[0].routed_experts``, (tokens, layers, k), saved with numpy. SGLang:
    ``meta_info["routed_experts"]`` or ``["indexer_topk"]`` of a response (.json), base64 of int32, whose shape
    (tokens, layers, k) the arguments say. Megatron: ``RouterReplay.get_recorded_data()``, a list by layer of
    (tokens, k), saved with torch.

    Source: vllm-project/vllm #28284; sgl-project/sglang #12162; NVIDIA/Megatron-LM,
    megatron/core/transformer/moe/router_replay.py. Deviation: none.

    Args:
        path: .npz or .safetensors with ``routed_experts``; .json of a response; .pt with a list or a tensor.
        layers: number of layers, where the file does not say it.
        k: number of choices, where the file does not say it.

    Returns:
        (tokens, layers, k) int64.

    Raises:
        InputError: if the file is none of these, lacks a layer, or has other sizes or swapped axes.
    """
    path = Path(path)
    if path.suffix == ".json":
        return _from_base64(path, layers, k)
    content = read_plain(path) if path.suffix == ".pt" else read_arrays(path, ["routed_experts"])
    content = content.get("routed_experts") if isinstance(content, Mapping) else content
    if isinstance(content, list | tuple):
        empty = [at for at, each in enumerate(content) if not isinstance(each, Tensor)]
        if empty or not content or len({each.shape for each in content}) > 1:
            what = (
                f"layer {empty[0]} was not recorded" if empty else "its layers differ in size, or there are none"
            )
            raise InputError(f"{path}: {what}.")
        content = torch.stack(list(content), 1)
    if not isinstance(content, Tensor) or content.ndim != 3 or content.is_floating_point():
        raise InputError(f"{path} holds no routed_experts: whole numbers (tokens, layers, k).")
    if layers not in (None, content.shape[1]) or k not in (None, content.shape[2]):
        got = tuple(content.shape)
        raise InputError(f"{path} has the shape {got}, not (tokens, {layers}, {k}): are axes swapped?")
    return content.long()


def _from_base64(path: Path, layers: int | None, k: int | None) -> Tensor:
    """Return the experts in a response of SGLang."""
    content = read_json(path)
    content = content.get("meta_info", content) if isinstance(content, dict) else {}
    text = next((content[name] for name in ("routed_experts", "indexer_topk") if name in content), None)
    if not isinstance(text, str) or layers is None or k is None or min(layers, k) < 1:
        raise InputError(f"{path}: routed_experts are a text in base64, whose layers and k must be named.")
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4").astype(np.int64)
        return torch.from_numpy(numbers.reshape(-1, layers, k))
    except ValueError:
        raise InputError(
            f"{path}: routed_experts are no int32 in base64 of {layers} layers with k = {k}."
        ) from None
