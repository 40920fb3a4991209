"""One transformer block: its constant in its input, and in each of its parameter tensors.

All results are natural logarithms. Quantities may carry leading sample dimensions; heads come last.

Example:
    >>> import torch
    >>> one = torch.ones(1, dtype=torch.float64)  # one head
    >>> attention = AttentionConstants(
    ...     log_map=log(6.0) * one, log_form=log(7.0) * one, upsilon=2 * one, query_weight=3 * one,
    ...     key_weight=5 * one, value_weight=1.5 * one, value_bias=0.5 * one, output_weight=4.0,
    ...     score_scale=0.5, token_norm=2.0,
    ... )
    >>> mlp = MlpConstants(weight_in=2.0, weight_out=3.0, activation=1.0, token_norm=6.0, hidden_norm=8.0)
    >>> block = BlockConstants(attention, mlp, tokens=10, attention_norm=0.5, mlp_norm=0.25, pre_norm=True)
    >>> log_input_constant(block).exp()  # (1 + 2·3·0.25)(1 + 0.5·2·6)
    tensor(17.5000, dtype=torch.float64)
    >>> log_parameter_constants(block)["W_q"].exp()  # 7 · 5 · 0.5, times the rest of the block, 2.5
    tensor(43.7500, dtype=torch.float64)
    >>> log_paper_parameter_constants(block)["V"].exp()  # LΞ = 20, times 2.5
    tensor(50.0000, dtype=torch.float64)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.bounds.bound import Assumption
from semdiag.mathematics.logarithms import Real, float64, log, log_one_plus, log_product, log_root_sum_squares

ATTENTION_PARAMETERS = ("W_q", "W_k", "b_k", "W_v", "b_v", "W_o", "b_o")
MLP_PARAMETERS = ("W_P", "b_P", "W_R", "b_R")


@dataclass(frozen=True, eq=False)
class AttentionConstants:
    """The attention of a block as the bounds see it; tensors of shape (..., heads).

    Attributes:
        log_map: ln λ_A per head, from :func:`~semdiag.mathematics.bounds.attention_bounds.attention_map_bound`.
        log_form: ln λ_M per head, from :func:`~semdiag.mathematics.bounds.attention_bounds.bilinear_form_bound`.
        upsilon: Υ_h.
        query_weight: ‖[W_q b_q]‖₂ per head.
        key_weight: ‖W_k‖₂ per head.
        value_weight: ‖W_v‖₂ per head.
        value_bias: ‖b_v‖ per head, 0 without bias.
        output_weight: ‖W_o‖₂ of the whole matrix, shape (...).
        score_scale: τ / sqrt(d_head).
        token_norm: Ξ, shape (...).
    """

    log_map: Tensor
    log_form: Tensor
    upsilon: Tensor
    query_weight: Tensor
    key_weight: Tensor
    value_weight: Tensor
    value_bias: Tensor
    output_weight: Real
    score_scale: float
    token_norm: Real


@dataclass(frozen=True, eq=False)
class MlpConstants:
    """The MLP W_R σ(W_P y + b_P) + b_R of a block.

    Attributes:
        weight_in: B_P = ‖W_P‖₂.
        weight_out: B_R = ‖W_R‖₂.
        activation: λ_σ, see :func:`~semdiag.mathematics.bounds.layer_constants.activation_lipschitz`.
        token_norm: Ξ_P, largest norm of a token at the MLP's input (after a pre-norm).
        hidden_norm: max_i ‖σ(W_P y_i + b_P)‖.
    """

    weight_in: Real
    weight_out: Real
    activation: float
    token_norm: Real
    hidden_norm: Real


@dataclass(frozen=True, eq=False)
class BlockConstants:
    """A block: attention, MLP, two residual connections and two normalisations.

    Attributes:
        attention: constants of the attention.
        mlp: constants of the MLP.
        tokens: L, number of tokens that are not padding.
        attention_norm: λ_LN1 of the normalisation before (pre-norm) or after (post-norm) the attention.
        mlp_norm: λ_LN2, the same for the MLP.
        pre_norm: Y = U + Attn(LN U), Z = Y + MLP(LN Y) if true; Y = LN(U + Attn U), Z = LN(Y + MLP Y) if not.
        assumptions: of λ_A and λ_M.
    """

    attention: AttentionConstants
    mlp: MlpConstants
    tokens: Real
    attention_norm: Real
    mlp_norm: Real
    pre_norm: bool
    assumptions: tuple[Assumption, ...] = ()


def log_input_constant(block: BlockConstants) -> Tensor:
    """Return the constant λ_X: how far the block's output moves per unit of its input.

    Pre-norm: (1 + B_R B_P λ_σ λ_LN2)(1 + λ_LN1 Σ_h Υ_h λ_A,h);
    post-norm: λ_LN2 (1 + B_R B_P λ_σ) · λ_LN1 (1 + Σ_h Υ_h λ_A,h).

    Source: paper, Thm 2, which is post-norm (docs/theory.md#block). Deviation: pre-norm and several heads.

    Args:
        block: the block's constants.

    Returns:
        ln λ_X, shape (...), float64.
    """
    attention = block.attention
    log_heads = torch.logsumexp(log_product(log(attention.upsilon), attention.log_map), dim=-1)
    return log_product(_log_attention_residual(block, log_heads), _log_mlp_residual(block))


def log_parameter_constants(block: BlockConstants) -> dict[str, Tensor]:
    """Return each parameter tensor's constant: how far the block's output moves per unit of that tensor.

    Heads are combined by the root of the sum of squares, as one tensor holds all of them.

    Source: docs/theory.md#parameters. Deviation: the paper has the four matrices of
    :func:`log_paper_parameter_constants` and no biases.

    Args:
        block: the block's constants.

    Returns:
        ln λ of shape (...) by name: W_q (with b_q as its last column), W_k, b_k (−∞: it cancels),
        W_v, b_v, W_o, b_o, W_P, b_P, W_R, b_R.
    """
    a = block.attention
    log_tokens, log_scale = log(block.tokens), log(a.score_scale)
    values = log_root_sum_squares(
        log(float64(a.value_weight) * float64(a.token_norm)[..., None] + float64(a.value_bias))
    )
    inside = {
        "W_q": log_root_sum_squares(log_product(a.log_form, log(a.key_weight))) + log_scale,
        "W_k": log_root_sum_squares(log_product(a.log_form, log(a.query_weight))) + log_scale,
        "b_k": torch.full_like(log_tokens, -torch.inf),
        "W_v": log_tokens + log(a.token_norm) + log(a.output_weight),
        "b_v": log_tokens + log(a.output_weight),
        "W_o": log_tokens + values,
        "b_o": log_tokens,
    }
    return _with_rest(block, inside | _log_mlp_constants(block))


def log_paper_parameter_constants(block: BlockConstants) -> dict[str, Tensor]:
    """Return the constants of the four matrices in the paper's Theorem 2: W, V, P and R.

    W is the score form M_h, V the value-output map of a head; their constants are λ_M,h and LΞ,
    heads combined by the root of the sum of squares.

    Source: paper, Thm 2 (docs/theory.md#parameters). Deviation: none for one head.

    Args:
        block: the block's constants, with the paper's λ_A and λ_W in ``attention`` for the paper's form.

    Returns:
        ln λ of shape (...) by name: W, V, W_P, W_R.
    """
    a = block.attention
    heads = float64(a.log_form).shape[-1]
    inside = {
        "W": log_root_sum_squares(a.log_form),
        "V": log(block.tokens) + log(a.token_norm) + 0.5 * log(heads),
    }
    mlp = {name: value for name, value in _log_mlp_constants(block).items() if name in ("W_P", "W_R")}
    return _with_rest(block, inside | mlp)


def _log_mlp_constants(block: BlockConstants) -> dict[str, Tensor]:
    """Return the constants of the MLP's parameters at the MLP's own output."""
    mlp, log_tokens = block.mlp, log(block.tokens)
    log_bias = log_tokens + log(mlp.weight_out) + log(mlp.activation)
    return {
        "W_P": log_bias + log(mlp.token_norm),
        "b_P": log_bias,
        "W_R": log_tokens + log(mlp.hidden_norm),
        "b_R": log_tokens,
    }


def _with_rest(block: BlockConstants, inside: dict[str, Tensor]) -> dict[str, Tensor]:
    """Propagate constants from the output of the attention or the MLP to the block's output."""
    mlp_names = set(MLP_PARAMETERS)
    after_mlp = float64(0.0) if block.pre_norm else log(block.mlp_norm)
    after_attention = _log_mlp_residual(block) + (0.0 if block.pre_norm else log(block.attention_norm))
    return {
        name: log_product(value, after_mlp if name in mlp_names else after_attention)
        for name, value in inside.items()
    }


def _log_attention_residual(block: BlockConstants, log_heads: Tensor) -> Tensor:
    """Return the constant of Y in U; ``log_heads`` is ln Σ_h Υ_h λ_A,h."""
    log_norm = log(block.attention_norm)
    return log_one_plus(log_product(log_norm, log_heads)) if block.pre_norm else log_norm + log_one_plus(log_heads)


def _log_mlp_residual(block: BlockConstants) -> Tensor:
    """Return the constant of Z in Y."""
    log_mlp = log(block.mlp.weight_in) + log(block.mlp.weight_out) + log(block.mlp.activation)
    log_norm = log(block.mlp_norm)
    return log_one_plus(log_norm + log_mlp) if block.pre_norm else log_norm + log_one_plus(log_mlp)
