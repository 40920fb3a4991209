"""Activations, normalisations, bounds with their assumptions, and the constants of one transformer block."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.spectral_norms import Real, float64, log, log_one_plus, log_product, log_root_sum_squares

# λ_σ = max |σ'| over the reals, rounded up in the last digit: docs/theory.md#layer-constants
ACTIVATION_LIPSCHITZ = {
    "relu": 1.0,
    "gelu": 1.12891,  # exact (erf): Φ(√2) + √2 φ(√2), at x = √2
    "mish": 1.08850,  # at x = 1.4906
}


def query_norm(token_norm: Real) -> Tensor:
    """Return Ξ̃ = sqrt(Ξ² + 1), the largest norm of the query side (u, 1); float64.

    Source: docs/theory.md#norms. Deviation: the paper has no biases, without which Ξ̃ = Ξ.

    Example:
        >>> round(query_norm(3.0).item(), 4)
        3.1623
    """
    xi = float64(token_norm)
    return torch.hypot(xi, torch.ones_like(xi))


def normalisation_lipschitz(token_std: Tensor) -> Tensor:
    """Return λ_LN over observed tokens: ‖LN x − LN y‖ ≤ λ_LN ‖x − y‖, float64 (...), without learned gain.

    λ_LN = 1 / min s, with s = sqrt(var + eps) of the tokens (..., tokens) before the normalisation, both inputs of
    a comparison included; +inf if one has constant entries and eps is 0.

    Source: docs/theory.md#normalisation (Dunkl–Williams). Deviation: the paper takes λ_LN as given.

    Example:
        >>> normalisation_lipschitz(torch.tensor([0.5, 2.0])).item()
        2.0
    """
    smallest = float64(token_std).amin(dim=-1)
    return torch.where(smallest > 0, 1 / smallest, math.inf)


@dataclass(frozen=True)
class Assumption:
    """An assumption of a bound, with the measurements that decide it.

    Example:
        >>> print(Assumption("separation is positive", {"smallest": -0.5}, holds=False))
        assumption not met: separation is positive (smallest = -0.5)
    """

    statement: str  # the assumption in words, as a report prints it
    measured: Mapping[str, float]  # numbers that decide it, by name (for instance the smallest separation)
    holds: bool  # whether the measured values meet the assumption

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} = {value:.4g}" for name, value in self.measured.items())
        verdict = "holds" if self.holds else "assumption not met"
        return f"{verdict}: {self.statement}" + (f" ({numbers})" if numbers else "")


@dataclass(frozen=True, eq=False)
class Bound:
    """An upper bound, as a natural logarithm, with all its assumptions.

    If an assumption fails, its value is +inf where no guarantee is left, else the formula's; see :attr:`unmet`.

    Example:
        >>> Bound(torch.tensor([0.0, 2.0]), (Assumption("k is the same", {}, holds=True),), "Thm 5").holds
        True
    """

    log_value: Tensor  # ln of the bound, float64, any shape; −inf stands for the constant 0, +inf for no guarantee
    assumptions: tuple[Assumption, ...]  # all assumptions that were checked, in order
    source: str  # equation of the paper or section of docs/theory.md

    @property
    def unmet(self) -> tuple[Assumption, ...]:
        """The assumptions that do not hold."""
        return tuple(a for a in self.assumptions if not a.holds)

    @property
    def holds(self) -> bool:
        """Whether every assumption holds."""
        return not self.unmet


def merged(groups: Iterable[Iterable[Assumption]]) -> tuple[Assumption, ...]:
    """Return the assumptions of several bounds in order of first appearance, each once."""
    assumptions: list[Assumption] = []
    for group in groups:
        assumptions.extend(a for a in group if a not in assumptions)
    return tuple(assumptions)


_MLP_PARAMETERS = {"W_P", "b_P", "W_R", "b_R"}


@dataclass(frozen=True, eq=False)
class AttentionConstants:
    """The attention of a block as the bounds see it; tensors of shape (..., heads)."""

    log_map: Tensor  # ln λ_A per head, from ``attention_map_bound``
    log_form: Tensor  # ln λ_M per head, from ``bilinear_form_bound``
    upsilon: Tensor  # Υ_h per head
    query_weight: Tensor  # ‖[W_q b_q]‖₂ per head
    key_weight: Tensor  # ‖W_k‖₂ per head
    value_weight: Tensor  # ‖W_v‖₂ per head
    value_bias: Tensor  # ‖b_v‖ per head, 0 without bias
    output_weight: Real  # ‖W_o‖₂ of the whole matrix, shape (...)
    score_scale: float  # τ / sqrt(d_head)
    token_norm: Real  # Ξ, shape (...)


@dataclass(frozen=True, eq=False)
class MlpConstants:
    """The MLP W_R σ(W_P y + b_P) + b_R of a block."""

    weight_in: Real  # B_P = ‖W_P‖₂
    weight_out: Real  # B_R = ‖W_R‖₂
    activation: float  # λ_σ, see ``ACTIVATION_LIPSCHITZ``
    token_norm: Real  # Ξ_P, largest norm of a token at the MLP's input (in a pre-norm block, normalised)
    hidden_norm: Real  # largest norm of a token's hidden units, max_i ‖σ(W_P y_i + b_P)‖


@dataclass(frozen=True, eq=False)
class BlockConstants:
    """A block: attention, MLP, two residual connections and two normalisations."""

    attention: AttentionConstants  # constants of the attention
    mlp: MlpConstants  # constants of the MLP
    tokens: Real  # L, number of tokens that are not padding
    attention_norm: Real  # λ_LN1 of the normalisation before (pre-norm) or after (post-norm) the attention
    mlp_norm: Real  # λ_LN2 of the MLP's normalisation, before or after it
    pre_norm: bool  # Y = U + Attn(LN U), Z = Y + MLP(LN Y) if true; Y = LN(U + Attn U), Z = LN(Y + MLP Y) if not
    assumptions: tuple[Assumption, ...] = ()  # assumptions of λ_A and λ_M


def log_input_constant(block: BlockConstants) -> Tensor:
    """Return ln λ_X, float64 (...): how far the block's output moves per unit of its input.

    Pre-norm: (1 + B_R B_P λ_σ λ_LN2)(1 + λ_LN1 Σ_h Υ_h λ_A,h);
    post-norm: λ_LN2 (1 + B_R B_P λ_σ) · λ_LN1 (1 + Σ_h Υ_h λ_A,h).

    Source: paper, Thm 2, which is post-norm (docs/theory.md#block). Deviation: pre-norm and several heads.
    """
    log_heads = torch.logsumexp(log_product(log(block.attention.upsilon), block.attention.log_map), dim=-1)
    log_norm = log(block.attention_norm)
    before = log_one_plus(log_product(log_norm, log_heads))
    log_residual = before if block.pre_norm else log_norm + log_one_plus(log_heads)
    return log_product(log_residual, _log_mlp_residual(block))


def log_parameter_constants(block: BlockConstants) -> dict[str, Tensor]:
    """Return ln λ (...) of each parameter tensor by name: how far the block's output moves per unit of it.

    Heads are combined by the root of the sum of squares. W_q has b_q as its last column; b_k has −∞: it cancels.

    Source: docs/theory.md#parameters. Deviation: the paper has four matrices and no biases.
    """
    a = block.attention
    log_tokens = log(block.tokens)
    log_scale = log(a.score_scale)
    values = float64(a.value_weight) * float64(a.token_norm)[..., None] + float64(a.value_bias)
    inside = {
        "W_q": log_root_sum_squares(log_product(a.log_form, log(a.key_weight))) + log_scale,
        "W_k": log_root_sum_squares(log_product(a.log_form, log(a.query_weight))) + log_scale,
        "b_k": torch.full_like(log_tokens, -torch.inf),
        "W_v": log_tokens + log(a.token_norm) + log(a.output_weight),
        "b_v": log_tokens + log(a.output_weight),
        "W_o": log_tokens + log_root_sum_squares(log(values)),
        "b_o": log_tokens,
    }
    return _with_rest(block, inside | _log_mlp_constants(block))


def log_paper_parameter_constants(block: BlockConstants) -> dict[str, Tensor]:
    """Return ln λ (...) of the four matrices in the paper's Theorem 2 by name: W, V, W_P and W_R.

    W is the score form M_h, V the value-output map of a head; their constants are λ_M,h and LΞ, heads combined by
    the root of the sum of squares. For the paper's form the block holds the paper's λ_A and λ_W.

    Source: paper, Thm 2 (docs/theory.md#parameters). Deviation: none for one head.
    """
    a = block.attention
    mlp = _log_mlp_constants(block)
    inside = {
        "W": log_root_sum_squares(a.log_form),
        "V": log(block.tokens) + log(a.token_norm) + 0.5 * log(a.log_form.shape[-1]),
    }
    return _with_rest(block, inside | {name: mlp[name] for name in ("W_P", "W_R")})


def _log_mlp_constants(block: BlockConstants) -> dict[str, Tensor]:
    mlp = block.mlp
    log_tokens = log(block.tokens)
    log_bias = log_tokens + log(mlp.weight_out) + log(mlp.activation)
    return {
        "W_P": log_bias + log(mlp.token_norm),
        "b_P": log_bias,
        "W_R": log_tokens + log(mlp.hidden_norm),
        "b_R": log_tokens,
    }


def _with_rest(block: BlockConstants, inside: dict[str, Tensor]) -> dict[str, Tensor]:
    """Propagate constants from the output of the attention or the MLP to the block's output."""
    after_mlp = float64(0.0) if block.pre_norm else log(block.mlp_norm)
    after_attention = _log_mlp_residual(block) + (0.0 if block.pre_norm else log(block.attention_norm))
    return {
        name: log_product(value, after_mlp if name in _MLP_PARAMETERS else after_attention)
        for name, value in inside.items()
    }


def _log_mlp_residual(block: BlockConstants) -> Tensor:
    log_mlp = log(block.mlp.weight_in) + log(block.mlp.weight_out) + log(block.mlp.activation)
    log_norm = log(block.mlp_norm)
    return log_one_plus(log_norm + log_mlp) if block.pre_norm else log_norm + log_one_plus(log_mlp)
