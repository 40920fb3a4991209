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
    """What a module's arguments say about its tokens.

    Attributes:
        given: (B, L) bool by argument, true for a real token; None if the argument was omitted.
        definitive: whether the module distinguishes masks for its own tokens from another sequence's, like a
            decoder.
        crossing: whether it was given another sequence but does not: a mask may be that sequence's.
        two: whether it takes two sequences: a mask may be either's.
        other: whether a mask with more axes was given.
    """

    given: dict[str, Tensor | None]
    definitive: bool = False
    crossing: bool = False
    two: bool = False
    other: bool = False

    def sure(self, name: str) -> bool:
        """Return whether a mask is for the queries, whatever the keys are."""
        return self.definitive or name in _OF_TARGET


def readings(name: str, mask: Tensor) -> list[Tensor]:
    """Return the ways to read a mask: as its name is usually meant, and inverted, as some code means it.

    Args:
        name: of the argument.
        mask: (B, L) bool, true for a real token as the name is usually meant.

    Returns:
        Masks, the likelier first; one that leaves no real token comes last.

    Example:
        >>> readings("padding_mask", torch.tensor([[False, False]]))
        [tensor([[True, True]]), tensor([[False, False]])]
    """
    return sorted((mask, ~mask), key=lambda each: not bool(each.any())) if name in _REAL else [mask]


def checked_real(real: Tensor | None) -> Tensor | None:
    """Return the user's ``real`` as a bool tensor.

    Args:
        real: (N, L), true or not 0 for a real token; None if not given.

    Returns:
        (N, L) bool, or None.

    Raises:
        InputError: if it is no such tensor.

    Example:
        >>> checked_real(torch.tensor([[1, 0]]))
        tensor([[ True, False]])
    """
    if real is None:
        return None
    if not isinstance(real, Tensor) or real.ndim != 2:
        got = f"one of shape {tuple(real.shape)}" if isinstance(real, Tensor) else f"a {type(real).__name__}"
        raise InputError(f"real must be a tensor (samples, tokens), true where a token is real. Got {got}.")
    return real.bool()


def real_tokens(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return which tokens of a batch are real, by the masks that the model is given.

    Args:
        model: its signature names the positional arguments.
        batch: a tensor, a dictionary or a tuple.

    Returns:
        (B, L) bool by argument; empty if nothing marks padding. In a decoder that is given tokens and no mask, all
        are real.

    Example:
        >>> class Model(nn.Module):
        ...     def forward(self, attention_mask): ...
        >>> real_tokens(Model(), {"attention_mask": torch.tensor([[1, 1, 0]])})["attention_mask"].tolist()
        [[True, True, False]]
    """
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
    """Return whether a module has an argument for a token mask, by name.

    Args:
        module: any; false for a TorchScript module, whose arguments are unknown.

    Example:
        >>> takes_masks(nn.TransformerEncoderLayer(8, 2)), takes_masks(nn.Linear(8, 8))
        (True, False)
    """
    return not isinstance(module, torch.jit.ScriptModule) and bool({*_parameters(module)} & {*MASK_NAMES})


def _parameters(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def token_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenMasks | None:
    """Return the token masks among a module's arguments.

    Args:
        module: that is called.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        The masks; None if the arguments do not fit the module's signature.

    Example:
        >>> layer, x = nn.TransformerEncoderLayer(8, 2), torch.zeros(2, 1, 8)
        >>> masks = token_masks(layer, (x,), {"src_key_padding_mask": torch.tensor([[False, True]])})
        >>> masks.given["src_key_padding_mask"]
        tensor([[ True, False]])
    """
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
