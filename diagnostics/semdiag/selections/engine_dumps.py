"""Queries, keys and routed experts that inference engines wrote to files, read without the engine."""

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing.batches import as_whole_number
from semdiag.mathematics.selections import without_repeats
from semdiag.selections.arrays import read_arrays
from semdiag.selections.files import type_name
from semdiag_files import InputError, read_json
from semdiag_models.checkpoint import read_plain


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
        sizes = _Sizes.of(_table_of(content, "config"))
        entries = _table_of(content, "qk_cache")
        dumped = [one for name in entries for one in sizes.layers(name, _table_of(entries, name))]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is no dump of vLLM-Hook: {type(error).__name__} {error}.") from None
    except (ValueError, InputError) as error:
        raise InputError(f"{path}: {error}") from None
    if not dumped or sizes.heads % sizes.shared or not 0 < sizes.scale < math.inf:
        heads = f"{sizes.heads} and {sizes.shared}"
        raise InputError(f"{path} holds no layer, no scale, or heads that share no keys: {heads}.")
    _check_layers(path, dumped)
    if any(each.first_query < 0 for each in dumped):
        raise InputError(f"{path} has more queries than keys: are q and k swapped?")
    return dumped


_WIDEST = 2**20  # width of a head: no tensor fits more


@dataclass(frozen=True)
class _Sizes:
    heads: int  # of queries
    shared: int  # heads of keys
    width: int
    scale: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "_Sizes":
        heads, shared, width = (
            as_whole_number(config[name], name, 1)
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        scale = config.get("attention_multiplier", min(width, _WIDEST) ** -0.5)
        if not isinstance(scale, int | float):
            raise ValueError(f"attention_multiplier must be a number. Got {type(scale).__name__}.")
        return cls(heads, shared, width, float(scale))

    def layers(self, name: str, entry: Mapping[str, Any]) -> Iterator[DumpedLayer]:
        """Yield the passes of a module."""
        layer = as_whole_number(entry["layer_num"], "layer_num", 0)
        for queries, keys in zip(entry["q"], entry["k_all"], strict=True):
            q = _by_head(name, queries, self.heads, self.width)
            k = _by_head(name, keys, self.shared, self.width)
            yield DumpedLayer(name, layer, q, k, self.scale, k.shape[2] - q.shape[2])


def _check_layers(path: str | Path, dumped: list[DumpedLayer]) -> None:
    """Refuse layers that are missing, or that two modules claim."""
    modules: dict[int, str] = {}
    for each in dumped:
        if modules.setdefault(each.layer, each.module) != each.module:
            raise InputError(f"{path}: {modules[each.layer]} and {each.module} are both layer {each.layer}.")
    numbers = sorted(modules)
    step = math.gcd(*(b - a for a, b in pairwise(numbers))) or 1
    gap = next((low for low, high in pairwise(numbers) if high - low != step), None)
    if gap is not None:
        raise InputError(f"{path} lacks layer {gap + step} between {numbers[0]} and {numbers[-1]}.")


def _table_of(content: Any, name: Any) -> Mapping[Any, Any]:
    """Return a table of a table; TypeError if there is none."""
    if not isinstance(content, Mapping):
        raise TypeError(f"where {name} should be, there is {type(content).__name__}")
    if not isinstance(content[name], Mapping):
        raise TypeError(f"{name} is no table but {type(content[name]).__name__}")
    table: Mapping[Any, Any] = content[name]
    return table


def _by_head(name: str, rows: Any, heads: int, width: int) -> Tensor:
    """Return (tokens, heads · width), or the last token's (heads · width,), as (1, heads, tokens, width)."""
    rows = rows[None] if isinstance(rows, Tensor) and rows.ndim == 1 else rows
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != heads * width or not len(rows):
        shape_words = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(
            f"{heads} heads of width {width} need tensors (tokens, {heads * width}). Got {shape_words}."
        )
    if not rows.is_floating_point():
        raise ValueError(f"{name}: queries and keys must be floating-point numbers. Got {type_name(rows)}.")
    if not _is_stored(rows):
        raise ValueError(f"{name}: a tensor of shape {tuple(rows.shape)} is larger than what the file holds.")
    if not bool(rows.float().isfinite().all()):
        raise ValueError(f"{name}: queries or keys are NaN or infinite.")
    return rows.reshape(1, len(rows), heads, width).transpose(1, 2)


def _is_stored(tensor: Tensor) -> bool:
    """Return whether a tensor holds each of its numbers; an expanded one repeats few, and fills the memory."""
    return (
        tensor.layout == torch.strided and tensor.numel() <= tensor.untyped_storage().nbytes() // tensor.itemsize
    )


def read_routed_experts(
    path: str | Path, layers: int | None = None, k: int | None = None, start: int = 0
) -> Tensor:
    """Read which experts (or keys) an engine chose, (tokens, layers, k) int64, for ``semdiag selections``.

    vLLM (#28284): ``RequestOutput.outputs[0].routed_experts`` in an .npz or .safetensors. SGLang (#12162):
    ``meta_info["routed_experts"]`` or ``["indexer_topk"]`` of a response (.json), base64 of int32; name ``layers``
    and ``k``, and the request's ``routed_experts_start_len`` as ``start``. Megatron:
    ``RouterReplay.get_recorded_data()``, a list by layer of (tokens, k), in a .pt.
    """
    path = Path(path)
    for name, value, least in (("layers", layers, 1), ("k", k, 1), ("start", start, 0)):
        if value is not None:
            as_whole_number(value, name, least)
    if path.suffix == ".json":
        experts = _from_base64(path, layers, k, start)
    else:
        content = read_plain(path) if path.suffix == ".pt" else read_arrays(path, ["routed_experts"])
        experts = _from_tensors(path, content.get("routed_experts") if isinstance(content, Mapping) else content)
    shape = tuple(experts.shape)
    if layers not in (None, shape[1]) or k not in (None, shape[2]):
        raise InputError(f"{path} has the shape {shape}, not (tokens, {layers}, {k}): are axes swapped?")
    if experts.numel() and int(experts.min()) < -1:
        raise InputError(f"{path} names the expert {int(experts.min())}; -1 stands for none, others count from 0.")
    return experts


def _from_tensors(path: Path, content: Any) -> Tensor:
    """Return experts of a tensor, or of a list of tensors by layer."""
    listed = list(content) if isinstance(content, list | tuple) else [content]
    for layer, each in enumerate(listed):
        if content is not each and each is None:
            raise InputError(f"{path}: layer {layer} was not recorded.")
        if (
            not isinstance(each, Tensor)
            or each.is_floating_point()
            or each.is_complex()
            or each.dtype == torch.bool
        ):
            raise InputError(f"{path} holds no routed_experts: whole numbers (tokens, layers, k).")
        if not _is_stored(each):
            raise InputError(f"{path}: a tensor of shape {tuple(each.shape)} is larger than what the file holds.")
    if len({each.shape for each in listed}) != 1:
        raise InputError(f"{path}: its layers differ in size, or there are none.")
    experts = listed[0] if listed[0] is content else torch.stack(listed, 1)
    if experts.ndim != 3:
        raise InputError(f"{path} holds no routed_experts: whole numbers (tokens, layers, k).")
    return experts.long()


def _from_base64(path: Path, layers: int | None, k: int | None, start: int) -> Tensor:
    """Return experts of a response, if they are as many as its tokens, and none is named twice in a row."""
    content = read_json(path)
    facts = content.get("meta_info", content) if isinstance(content, dict) else {}
    facts = facts if isinstance(facts, dict) else {}
    text = facts.get("routed_experts", facts.get("indexer_topk"))
    if not isinstance(text, str) or layers is None or k is None:
        raise InputError(f"{path}: routed_experts are a text in base64, whose layers and k must be named.")
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4").astype(np.int64)
        experts = torch.from_numpy(numbers.reshape(-1, layers, k))
    except ValueError:
        raise InputError(f"{path}: routed_experts are no int32 in base64, {layers} layers by {k}.") from None
    tokens = _tokens(facts, start)
    if tokens not in (None, len(experts)):
        raise InputError(
            f"{path}: {layers} layers by {k} make {len(experts):,} tokens, but the response has {tokens:,}. "
            "Name its layers, k, and start (routed_experts_start_len)."
        )
    if _has_repeats(experts) or _are_swapped(experts):
        raise InputError(f"{path}: {layers} layers by {k} do not fit its numbers. Are layers and k swapped?")
    return experts


def _tokens(facts: Mapping[str, Any], start: int) -> int | None:
    """Return how many tokens from the start the model ran, all but the last; None if it does not say."""
    prompt = facts.get("prompt_tokens")
    completion = facts.get("completion_tokens")
    return prompt + completion - 1 - start if type(prompt) is int and type(completion) is int else None


def _has_repeats(rows: Tensor) -> bool:
    flat = rows.flatten(0, -2)
    return bool(((without_repeats(flat) != flat) & (flat >= 0)).any())


_NEVER = 14.0  # e^-14 is below one in a million
_ENOUGH = 256  # tokens to judge


def _are_swapped(experts: Tensor) -> bool:
    """Return whether wider rows repeat none either, which those of several layers hardly would."""
    _, layers, k = experts.shape
    numbers = layers * k
    complete = experts[(experts >= 0).all(-1).all(-1)][:_ENOUGH].flatten(1)
    widths = [width for width in range(k + 1, numbers // 2 + 1) if numbers % width == 0]
    if layers > k:
        widths.append(layers)
    return any(_are_rows(complete, k, width) for width in widths) if len(complete) else False


def _are_rows(experts: Tensor, k: int, width: int) -> bool:
    """Return whether numbers by token are rows of ``width``, and not of k.

    Of n experts chosen alike often, two of different rows are the same with probability 1/n: p such pairs are all
    different with probability about e^(-p/n).
    """
    tokens, numbers = experts.shape
    place = torch.arange(numbers)
    pieces = place.div(k, rounding_mode="floor") + numbers * place.div(width, rounding_mode="floor")
    edges = torch.cat([torch.tensor([0]), pieces.diff().nonzero().flatten() + 1, torch.tensor([numbers])])
    sizes = edges.diff()  # of a layer in a wider row
    pairs = (numbers * width - int(sizes.square().sum())) // 2
    if pairs * tokens <= _NEVER * (int(experts.max()) + 1):
        return False
    return not _has_repeats(experts.view(tokens, -1, width))
