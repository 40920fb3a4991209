"""Constants of single layers: heads' shares of the weights, token norms, normalisation, activations."""

import math
from difflib import get_close_matches

import torch
from torch import Tensor

from semdiag.mathematics.logarithms import Real, float64

# Largest |σ'| over the reals, rounded up in the last digit.
ACTIVATION_LIPSCHITZ = {
    "relu": 1.0,
    "gelu": 1.12891,  # exact (erf): Φ(√2) + √2 φ(√2), at x = √2
    "mish": 1.08850,  # at x = 1.4906
}


def activation_lipschitz(name: str) -> float:
    """Return λ_σ, the Lipschitz constant of an activation.

    Source: docs/theory.md#layer-constants. Deviation: none.

    Args:
        name: one of :data:`ACTIVATION_LIPSCHITZ`.

    Returns:
        max |σ'|, rounded up.

    Raises:
        ValueError: if the activation is not known.

    Example:
        >>> activation_lipschitz("relu")
        1.0
    """
    if name not in ACTIVATION_LIPSCHITZ:
        near = get_close_matches(name, ACTIVATION_LIPSCHITZ, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join(ACTIVATION_LIPSCHITZ)
        raise ValueError(f"The Lipschitz constant of activation {name!r} is not known.{hint} Known: {known}.")
    return ACTIVATION_LIPSCHITZ[name]


def split_rows(weight: Tensor, heads: int) -> Tensor:
    """Return each head's rows of a stacked W_q, W_k or W_v, or entries of its bias.

    Source: docs/theory.md#attention-call. Deviation: none.

    Args:
        weight: shape (heads · d_head, d), or (heads · d_head,) for a bias.
        heads: number of heads.

    Returns:
        shape (heads, d_head, d), or (heads, d_head).

    Raises:
        ValueError: if the rows cannot be shared equally.

    Example:
        >>> split_rows(torch.zeros(6, 4), heads=2).shape
        torch.Size([2, 3, 4])
    """
    if weight.shape[0] % heads:
        raise ValueError(f"{weight.shape[0]} rows cannot be shared among {heads} heads.")
    return weight.reshape(heads, weight.shape[0] // heads, *weight.shape[1:])


def split_columns(weight: Tensor, heads: int) -> Tensor:
    """Return each head's columns of W_o, which mixes the heads' outputs.

    Source: docs/theory.md#attention-call. Deviation: none.

    Args:
        weight: W_o, shape (d, heads · d_head).
        heads: number of heads.

    Returns:
        shape (heads, d, d_head).

    Raises:
        ValueError: if the columns cannot be shared equally.

    Example:
        >>> split_columns(torch.zeros(4, 6), heads=2).shape
        torch.Size([2, 4, 3])
    """
    return split_rows(weight.T, heads).mT


def query_norm(token_norm: Real, *, query_bias: bool) -> Tensor:
    """Return Ξ̃, the largest norm of the query side (u, 1): sqrt(Ξ² + 1) with b_q, Ξ without.

    Source: docs/theory.md#norms. Deviation: the paper has no biases.

    Args:
        token_norm: Ξ, largest norm of a token at the attention's input.
        query_bias: whether the query projection has a bias.

    Returns:
        Ξ̃, same shape, float64.

    Example:
        >>> query_norm(3.0, query_bias=False).item()
        3.0
        >>> round(query_norm(3.0, query_bias=True).item(), 4)
        3.1623
    """
    xi = float64(token_norm)
    return torch.hypot(xi, torch.ones_like(xi)) if query_bias else xi


def normalisation_lipschitz(token_std: Tensor, gain: Tensor | None = None) -> Tensor:
    """Return λ_LN over observed tokens: ‖LN x − LN y‖ ≤ λ_LN ‖x − y‖.

    λ_LN = max|gain| / min s, with s = sqrt(var + eps) of the tokens before the normalisation.

    Source: docs/theory.md#normalisation (Dunkl–Williams). Deviation: the paper takes λ_LN as given.

    Args:
        token_std: s of every observed token, at both ends of a comparison; shape (..., tokens), positive.
        gain: affine weight of the normalisation, or None.

    Returns:
        The constant, shape (...), float64.

    Raises:
        ValueError: if there is no token, or a token has s ≤ 0 (constant entries and eps = 0).

    Example:
        >>> normalisation_lipschitz(torch.tensor([0.5, 2.0])).item()
        2.0
    """
    std = float64(token_std)
    if not std.numel() or not bool((std > 0).all()):
        smallest = std.min().item() if std.numel() else math.nan
        raise ValueError(f"Normalisation needs tokens with sqrt(var + eps) > 0. The smallest: {smallest}.")
    largest_gain = 1.0 if gain is None else float64(gain).abs().max().item()
    return largest_gain / std.amin(dim=-1)
