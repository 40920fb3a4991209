"""Token masks that a module is given: which tokens of a batch are real, and which are padding."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing.batches import Batch
from semdiag_models import InputError

# Arguments that mark a module's own tokens: the first group is true or 1 for real tokens, the second for padding.
_REAL = ("decoder_attention_mask", "attention_mask", "padding_mask")
PADDED = ("tgt_key_padding_mask", "src_key_padding_mask", "key_padding_mask")
MASK_NAMES = (*_REAL, *PADDED)
_OF_TARGET = ("decoder_attention_mask", "tgt_key_padding_mask")
# A module that takes a mask for another sequence distinguishes it from the mask for its own tokens.
_OF_OTHER = ("encoder_attention_mask", "memory_key_padding_mask")
# A sequence other than the module's first.
_OTHER = ("key_value_states", "encoder_hidden_states", "memory", "context")
_TARGET = ("tgt", "decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """What a module's arguments say about its tokens."""

    given: dict[str, Tensor | None]  # (B, L) bool by argument, true for a real token
    # whether the module distinguishes masks for its own tokens from another sequence's, like a decoder
    definitive: bool = False
    crossing: bool = False  # whether it was given another sequence but does not: a mask may be that sequence's
    two: bool = False  # whether it takes two sequences: a mask may be either's
    other: bool = False  # whether a mask with more axes was given

    def sure(self, name: str) -> bool:
        """Return whether a mask is for the queries, whatever the keys are."""
        return self.definitive or name in _OF_TARGET


def readings(name: str, mask: Tensor) -> list[Tensor]:
    """Return the ways to read a mask: as its name is usually meant, and inverted, as some code means it."""
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
    """Return which tokens of a batch are real, by the masks that the model is given."""
    named = dict(batch) if isinstance(batch, Mapping) else {}
    values = () if named else (batch,) if isinstance(batch, Tensor) else tuple(batch)
    masks = token_masks(model, values, named)
    given = {} if masks is None or masks.crossing else masks.given
    real = {name: mask for name, mask in given.items() if mask is not None}
    ids = named.get("decoder_input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        real.setdefault("decoder_attention_mask", torch.ones_like(ids, dtype=torch.bool))
    return real


def takes_masks(module: nn.Module) -> bool:
    """Return whether a module has an argument for a token mask, by name."""
    return not isinstance(module, torch.jit.ScriptModule) and bool({*_parameters(module)} & {*MASK_NAMES})


def _parameters(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def token_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenMasks | None:
    """Return the token masks among a module's arguments."""
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself will say what is wrong
        return None
    for several in [x for x in given.values() if isinstance(x, Mapping)]:  # a dictionary of arguments, or **kwargs
        given = {**given, **several}
    names = _parameters(module)
    both = "decoder_attention_mask" in names or {"src_key_padding_mask", "tgt_key_padding_mask"} <= {*names}
    definitive = not both and any(name in names for name in _OF_OTHER)
    if isinstance(module, nn.MultiheadAttention):
        crossing = not _same(given.get("query"), given.get("key"))
    else:
        crossing = not definitive and any(given.get(name) is not None for name in _OTHER)
    masks: dict[str, Tensor | None] = {}
    other = False
    for name in MASK_NAMES:
        value = given.get(name)
        if name not in names and value is None:
            continue
        if isinstance(value, Tensor) and value.ndim in (1, 2):  # one axis: tokens without a batch axis
            marked = value.bool() if value.dtype == torch.bool else value != 0
            masks[name] = (marked if name in _REAL else ~marked).view(-1, value.shape[-1])
        elif value is not None:
            other = True
        else:
            masks[name] = None
    return TokenMasks(masks, definitive, crossing, both or bool({*names} & {*_OTHER, *_TARGET}), other)


def _same(query: Any, key: Any) -> bool:
    """Return whether query and key are the same tokens, even if they were computed twice."""
    if query is key or not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return query is key
    return query.shape == key.shape and query.dtype == key.dtype and torch.equal(query, key)
