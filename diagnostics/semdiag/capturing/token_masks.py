"""Masks of tokens that a module is given: which tokens of a batch are real, and which are padding."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing.batches import Batch
from semdiag_models import InputError

# Arguments that mark a module's own tokens: true or 1 where a token is real; in the second group where it is not.
_REAL = ("decoder_attention_mask", "attention_mask", "padding_mask")
_PADDED = ("tgt_key_padding_mask", "src_key_padding_mask", "key_padding_mask")
MASK_NAMES = (*_REAL, *_PADDED)
# A module that takes one of these tells apart its own tokens from another sequence's.
_DECODER = ("encoder_attention_mask", "memory")
# Where one of these is given, the module attends to another sequence, and its mask is that sequence's.
_OTHER = ("key_value_states", "encoder_hidden_states")


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """What a module's arguments say of its tokens.

    Attributes:
        given: (B, L) bool by argument, true where a token is real; None where the argument was left out.
        definitive: whether the module tells its own tokens apart from another sequence's, as a decoder does.
        other: whether a mask of more axes was given.
    """

    given: dict[str, Tensor | None]
    definitive: bool
    other: bool


def checked_real(real: Tensor | None) -> Tensor | None:
    """Which tokens are real, as the user says it.

    Args:
        real: (N, L), true or not 0 where a token is real; None: not said.

    Returns:
        (N, L) bool, or None.

    Raises:
        InputError: if it is none of these.

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
    """Which tokens of a batch are real, by what the model itself is given.

    Args:
        model: whose signature names positional arguments.
        batch: a tensor, a dictionary or a tuple.

    Returns:
        (B, L) bool by argument; empty where nothing marks padding. Of a decoder that is given tokens and no mask
        all are real.

    Example:
        >>> class Model(nn.Module):
        ...     def forward(self, attention_mask): ...
        >>> real_tokens(Model(), {"attention_mask": torch.tensor([[1, 1, 0]])})["attention_mask"].tolist()
        [[True, True, False]]
    """
    named = dict(batch) if isinstance(batch, Mapping) else {}
    values = () if named else (batch,) if isinstance(batch, Tensor) else tuple(batch)
    masks = token_masks(model, values, named)
    found = {} if masks is None else {name: mask for name, mask in masks.given.items() if mask is not None}
    ids = named.get("decoder_input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        found.setdefault("decoder_attention_mask", torch.ones_like(ids, dtype=torch.bool))
    return found


def takes_masks(module: nn.Module) -> bool:
    """Whether a module takes a mask of tokens by an argument's name.

    Args:
        module: any; of a TorchScript module nothing is known.

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
    """The masks of tokens among a module's arguments.

    Args:
        module: that is called.
        args: by position.
        kwargs: by name.

    Returns:
        The masks; None where they are those of another sequence, or the arguments are not the module's.

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
    given = {**given, **given.get("kwargs", {})}
    names = _parameters(module)
    definitive = any(name in names for name in _DECODER)
    if any(given.get(name) is not None for name in _OTHER) and "encoder_attention_mask" not in names:
        return None
    if isinstance(module, nn.MultiheadAttention) and given.get("query") is not given.get("key"):
        return None
    both = "decoder_attention_mask" in names or {"src_key_padding_mask", "tgt_key_padding_mask"} <= {*names}
    masks: dict[str, Tensor | None] = {}
    other = False
    for name in MASK_NAMES:
        value = given.get(name)
        if name not in names and value is None:
            continue
        if isinstance(value, Tensor) and value.ndim == 2:
            marked = value.bool() if value.dtype == torch.bool else value != 0
            masks[name] = marked if name in _REAL else ~marked
        elif value is not None:
            other = True
        else:
            masks[name] = None
    return TokenMasks(masks, definitive and not both, other)
