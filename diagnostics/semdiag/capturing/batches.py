"""Batches in the form that a model takes: splitting, counting, and the masks of their tokens."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from semdiag_files import InputError

_NAMES = re.compile("label|target|ids|token|position|length|lens|segment|index|time|step")


def refuse_unnamed_labels(model: nn.Module, batch: Sequence[Any]) -> None:
    """Refuse a tuple whose labels would go to an optional argument with another meaning."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return
    if len(batch) > len(parameters):
        return  # the call itself will fail, or takes any number
    first = batch[0] if batch else None
    samples = len(first) if isinstance(first, Tensor) and first.ndim else -1
    for at, (value, parameter) in enumerate(zip(batch, parameters, strict=False)):
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            return
        optional = parameter.default is not parameter.empty and at > 0
        if optional and isinstance(value, Tensor) and _may_be_labels(value, parameter.name.lower(), samples):
            names = ", ".join(f"{one.name!r}: …" for one in parameters[: len(batch)])
            raise InputError(
                f"Entry {at} of the batch may be labels, or the argument {parameter.name} of "
                f"{type(model).__name__}. Give labels apart (labels=), or name the arguments: {{{names}}}."
            )


def _may_be_labels(value: Tensor, name: str, samples: int) -> bool:
    if _NAMES.search(name) or value.ndim not in (1, 2) or len(value) != samples:
        return False
    integral = not value.is_floating_point() and not value.is_complex() and value.element_size() > 1
    if "mask" in name:
        return integral and bool(((value < 0) | (value > 1) | (value.ndim == 1)).any())
    return value.ndim == 1 or integral


Batch = Tensor | Mapping[str, Any] | Sequence[Any]


def call(model: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch: a dictionary as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    refuse_unnamed_labels(model, batch)
    return model(*batch)


def samples_of(batch: Batch) -> int:
    """Return the number of samples: the length of the first tensor with several axes, else of the first tensor."""
    lengths = [(t.ndim == 1, len(t)) for t in tensors_of(batch) if t.ndim]
    return min(lengths, key=lambda entry: entry[0], default=(True, 0))[1]


def second_axis(model: nn.Module, batch: Batch) -> int:
    """Return the second axis of a batch, where a layer of torch's has the samples (batch_first=False); else 0."""
    if all(getattr(module, "batch_first", True) for module in model.modules()):
        return 0
    return next((t.shape[1] for t in tensors_of(batch) if t.ndim > 1), 0)


def only_token_ids(batch: Batch) -> bool:
    """Return whether a batch consists of token ids (N, L) and their masks: integers or bools on two axes."""
    matrices = [t for t in tensors_of(batch) if t.ndim > 1]
    return bool(matrices) and not any(t.ndim > 2 or t.is_floating_point() or t.is_complex() for t in matrices)


def longest(batch: Batch) -> int:
    """Return the length of a batch of token ids: the largest second axis, the decoder's included; else 1."""
    return max((t.shape[1] for t in tensors_of(batch) if t.ndim > 1), default=1)


def each(batches: Batch | Iterable[Batch], size: int) -> Iterator[Batch]:
    """Yield a user's inputs in batches of at most ``size`` samples; do not cut inputs that are batches already."""
    cut: Iterable[Any]
    if isinstance(batches, Tensor):
        cut = torch.split(batches, size) if batches.ndim else ()
    elif isinstance(batches, Mapping):
        samples = samples_of(batches)
        cut = (_part(batches, slice(i, i + size), samples) for i in range(0, samples, size))
    elif isinstance(batches, Iterable) and not isinstance(batches, str | bytes):
        cut = batches
    else:
        cut = (batches,)  # refused below
    for batch in cut:
        if not isinstance(batch, Tensor | Mapping | tuple | list) or not tensors_of(batch):
            empty = " without a tensor" if isinstance(batch, Mapping | tuple | list) else ""
            raise InputError(
                "Inputs are a tensor, a dictionary of tensors (keyword arguments), or a list of batches, each a "
                f"tensor, a dictionary or a tuple of arguments. Got {type(batch).__name__}{empty}."
            )
        if samples_of(batch):
            yield batch


def split(batches: Batch | Iterable[Batch], size: int) -> list[Batch]:
    """Return all batches of :func:`each`."""
    return list(each(batches, size))


def first_samples(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Yield the first samples of batches, and read none beyond them."""
    for batch in batches:
        part = batch if isinstance(batch, tuple | list) else next(each(batch, count))
        yield part
        count -= samples_of(part)
        if count <= 0:
            return


def without_first(batches: Iterable[Batch], count: int) -> list[Batch]:
    """Return the batches without what :func:`first_samples` yields."""
    later: list[Batch] = []
    for batch in batches:
        size = samples_of(batch)
        if count <= 0:
            later.append(batch)
        elif count < size:
            rows = slice(count, size)
            later.append(batch[rows] if isinstance(batch, Tensor) else _part(batch, rows, size))  # type: ignore[arg-type]
        count -= size
    return later


def named_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module that a model names as its input embedding, like transformers' models; None if none."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except Exception:  # some models have none, and raise anything
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def with_tensor(batch: Batch, old: Tensor, new: Tensor) -> Batch:
    """Return the batch with one of its tensors replaced."""
    return _mapped(batch, lambda tensor: new if tensor is old else tensor)


def repeated(batch: Batch, times: int) -> Batch:
    """Return a batch repeated along its samples, as a whole."""
    size = samples_of(batch)
    return _mapped(batch, lambda t: torch.cat([t] * times) if t.ndim and len(t) == size else t)


def _map_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(batch, Mapping):
        return {name: _map_tensors(value, change) for name, value in batch.items()}
    return change(batch) if isinstance(batch, Tensor) else batch


def _mapped(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    if isinstance(batch, Tensor | Mapping):
        changed: Batch = _map_tensors(batch, change)
        return changed
    return tuple(_map_tensors(value, change) for value in batch)


def _part(batch: Mapping[str, Any], rows: slice, samples: int) -> Batch:
    """Return some rows of every tensor with one entry per sample, and everything else unchanged."""
    return _mapped(batch, lambda tensor: tensor[rows] if tensor.ndim and len(tensor) == samples else tensor)


def moved(batch: Batch, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
    """Move the tensors of a batch to a device; floating-point ones also to a dtype."""
    return _mapped(batch, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None))


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch, in its order."""
    return [value for _, value in entries(batch) if isinstance(value, Tensor)]


def entries(batch: Batch) -> list[tuple[str | int, Any]]:
    """Return the values of a batch by name or position, in order, with the entries of dictionaries inside."""
    if isinstance(batch, Tensor):
        return [(0, batch)]
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return [
        entry
        for name, value in named
        for entry in (entries(value) if isinstance(value, Mapping) else [(name, value)])
    ]


# Arguments that mark a module's own tokens: _REAL is true or 1 for real tokens, PADDED for padding.
_REAL = ("decoder_attention_mask", "attention_mask", "padding_mask")
PADDED = ("tgt_key_padding_mask", "src_key_padding_mask", "key_padding_mask")
MASK_NAMES = (*_REAL, *PADDED)
_OF_TARGET = ("decoder_attention_mask", "tgt_key_padding_mask")
# Only a module with two kinds of masks takes these, for another sequence.
_OF_OTHER = ("encoder_attention_mask", "memory_key_padding_mask")
# A sequence other than the module's first one.
_OTHER = ("key_value_states", "encoder_hidden_states", "memory", "context")
_TARGET = ("tgt", "decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """Token masks among a module's arguments."""

    masks: dict[str, Tensor | None]  # (B, L) bool by argument name, true for a real token
    definitive: bool = False  # whether the module takes masks for its own tokens and another sequence's
    crossing: bool = False  # whether it got another sequence otherwise: a mask may belong to that sequence
    two_sequences: bool = False  # whether it takes two sequences: a mask may belong to either
    more_axes: bool = False  # whether it got a mask with more axes
    other_inputs: bool = False  # whether it got inputs beside the tokens of its masks, such as images

    def sure(self, name: str) -> bool:
        """Return whether a mask is for the queries, whatever the keys are."""
        return self.definitive or name in _OF_TARGET


def readings(name: str, mask: Tensor) -> list[Tensor]:
    """Return both readings of a mask: in its name's usual meaning, and inverted, as some code means it."""
    return sorted((mask, ~mask), key=lambda each: not bool(each.any())) if name in _REAL else [mask]


def checked_real(real: Tensor | None) -> Tensor | None:
    """Return the user's ``real`` as a bool tensor."""
    if real is None:
        return None
    if not isinstance(real, Tensor) or real.ndim != 2:
        got = f"one of shape {tuple(real.shape)}" if isinstance(real, Tensor) else f"a {type(real).__name__}"
        raise InputError(f"real must be a tensor (samples, tokens), true where a token is real. Got {got}.")
    return real.bool()


def real_tokens(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return which tokens of a batch are real, by the masks that the model gets."""
    named = dict(batch) if isinstance(batch, Mapping) else {}
    values = () if named else (batch,) if isinstance(batch, Tensor) else tuple(batch)
    masks = token_masks(model, values, named)
    if masks is None or masks.crossing:
        real = {}
    else:
        real = {name: mask for name, mask in masks.masks.items() if mask is not None}
    ids = named.get("decoder_input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        real.setdefault("decoder_attention_mask", torch.ones_like(ids, dtype=torch.bool))
    return real


def takes_masks(module: nn.Module) -> bool:
    """Return whether a module has a token mask among its named arguments."""
    with suppress(TypeError, ValueError):
        named = () if isinstance(module, torch.jit.ScriptModule) else _signature(module).parameters
        return any(name in named for name in MASK_NAMES)
    return False


def _signature(module: nn.Module) -> inspect.Signature:
    kind: Any = type(module)
    return inspect.signature(module.forward) if "forward" in vars(module) else _of_class(kind)


@lru_cache(maxsize=1024)
def _of_class(kind: Any) -> inspect.Signature:
    signature = inspect.signature(kind.forward)
    return signature.replace(parameters=[*signature.parameters.values()][1:])


def token_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenMasks | None:
    """Return the token masks among a module's arguments."""
    try:
        names = {*_signature(module).parameters}
        arguments = _signature(module).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself will say what is wrong
        return None
    for nested in [x for x in arguments.values() if isinstance(x, Mapping)]:  # a dictionary, or **kwargs
        arguments = {**arguments, **nested}
    both = "decoder_attention_mask" in names or {"src_key_padding_mask", "tgt_key_padding_mask"} <= names
    definitive = not both and any(name in names for name in _OF_OTHER)
    present = {
        name: arguments.get(name) for name in MASK_NAMES if name in names or arguments.get(name) is not None
    }
    masks = _flat_masks(present)
    return TokenMasks(
        masks,
        definitive,
        _crosses(module, arguments, definitive),
        two_sequences=both or bool(names & {*_OTHER, *_TARGET}),
        more_axes=len(masks) < len(present),
        other_inputs=_has_other_inputs(masks, arguments),
    )


def _crosses(module: nn.Module, arguments: Mapping[str, Any], definitive: bool) -> bool:
    """Return whether queries and keys are of two sequences."""
    if isinstance(module, nn.MultiheadAttention):
        return not _same(arguments.get("query"), arguments.get("key"))
    return not definitive and any(arguments.get(name) is not None for name in _OTHER)


def _flat_masks(masks: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return which tokens are real by the masks of tokens, None for an absent one; without masks of more axes."""
    flat = {name: value for name, value in masks.items() if value is None or _is_flat(value)}
    return {name: None if value is None else _real_by(name, value) for name, value in flat.items()}


def _is_flat(value: Any) -> bool:
    """Return whether a mask is of tokens, with or without a batch axis."""
    return isinstance(value, Tensor) and value.ndim in (1, 2)


def _real_by(name: str, mask: Tensor) -> Tensor:
    """Return which tokens are real by a mask in its name's usual meaning, (B, L) bool."""
    marked = mask.bool() if mask.dtype == torch.bool else mask != 0
    return (marked if name in _REAL else ~marked).view(-1, mask.shape[-1])


def _has_other_inputs(masks: Mapping[str, Tensor | None], arguments: Mapping[str, Any]) -> bool:
    """Return whether there are floating-point inputs beside the tokens of the masks."""
    sizes = {tuple(mask.shape) for mask in masks.values() if mask is not None}
    inputs = [x for name, x in arguments.items() if name not in MASK_NAMES and isinstance(x, Tensor)]
    return bool(sizes) and any(
        x.is_floating_point() and x.ndim > 1 and tuple(x.shape[:2]) not in sizes for x in inputs
    )


def _same(query: Any, key: Any) -> bool:
    """Return whether query and key are the same tokens, even if computed twice."""
    if query is key or not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return query is key
    return query.shape == key.shape and query.dtype == key.dtype and torch.equal(query, key)


def as_whole_number(value: Any, name: str, least: int | None = None) -> int:
    """Return a whole number; refuse anything else, or one that is too small."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number. Got {value!r}.")
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least}. Got {value}.")
    return int(value)


def as_whole_numbers(values: Any, name: str, least: int | None = None) -> tuple[int, ...]:
    """Return one or several whole numbers as a tuple; refuse anything else."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        values = (values,)
    return tuple(as_whole_number(value, name, least) for value in values)
