"""Theorem 2: the training objective is λ_L-Lipschitz in the parameters. In log space throughout.

Example:
    >>> import torch
    >>> from semdiag.mathematics.bounds.block_bounds import AttentionConstants, MlpConstants
    >>> one = torch.ones(1, dtype=torch.float64)  # one head
    >>> attention = AttentionConstants(
    ...     log_map=log(6.0) * one, log_form=log(7.0) * one, upsilon=2 * one, query_weight=3 * one,
    ...     key_weight=5 * one, value_weight=1.5 * one, value_bias=0.5 * one, output_weight=4.0,
    ...     score_scale=0.5, token_norm=2.0,
    ... )
    >>> mlp = MlpConstants(weight_in=2.0, weight_out=3.0, activation=1.0, token_norm=6.0, hidden_norm=8.0)
    >>> block = BlockConstants(attention, mlp, tokens=10, attention_norm=0.5, mlp_norm=0.25, pre_norm=True)
    >>> readout = Readout(head_weight=3.0, pooled_norm=5.0, pooling=0.1)
    >>> named = log_parameter_bounds([block, block], readout, log_embedding_constant(torch.tensor([3, 4])))
    >>> named["block 0 b_R"].exp()  # √2 · 3 · 0.1 · 10, times λ_X = 17.5 of the second block
    tensor(74.2462, dtype=torch.float64)
    >>> network_bound(named, network_assumptions([block, block])).log_value.exp()
    tensor(2447.5400, dtype=torch.float64)
    >>> sorted(log_paper_parameter_bounds([block], readout))
    ['block 0 V', 'block 0 W', 'block 0 W_P', 'block 0 W_R']
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.bounds.block_bounds import (
    BlockConstants,
    log_input_constant,
    log_paper_parameter_constants,
    log_parameter_constants,
)
from semdiag.mathematics.bounds.bound import Assumption, Bound, merged
from semdiag.mathematics.logarithms import Real, broadcast, float64, log, log_product, log_root_sum_squares

CROSS_ENTROPY_LIPSCHITZ = math.sqrt(2)  # ‖softmax − one-hot‖₂ ≤ √2
ONE_PARAMETER_VECTOR = Assumption(
    "the constants are of one parameter vector: bounds of the gradient there, no Lipschitz constants of a region",
    {"parameter vectors": 1.0},
    holds=True,
)


@dataclass(frozen=True, eq=False)
class Readout:
    """Pooling, linear head and loss on top of the last block.

    Attributes:
        head_weight: ‖Φ‖₂.
        pooled_norm: largest norm of a pooled representation.
        pooling: weight of each token in the pooled representation: 1/L for the mean, 1 for a CLS token.
        loss: Lipschitz constant of the loss in the logits: √2 for cross-entropy.
    """

    head_weight: Real
    pooled_norm: Real
    pooling: Real
    loss: Real = CROSS_ENTROPY_LIPSCHITZ

    @property
    def log_token_constant(self) -> Tensor:
        """How far the loss moves per unit of the last block's output, as a logarithm."""
        return log_product(log(self.loss), log(self.head_weight) + log(self.pooling))


def loss_residual(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of cross-entropy in the logits, softmax − one-hot: of norm ≤ √2, and small once learned.

    1 − p of the label is summed over the other classes, for precision.

    Source: docs/theory.md#local-form. Deviation: the paper takes √2 for its norm.

    Args:
        logits: shape (..., classes).
        labels: int64, shape (...).

    Returns:
        The residual, shape (..., classes), float64.

    Example:
        >>> loss_residual(torch.tensor([[0.0, 0.0], [40.0, 0.0]]), torch.tensor([0, 0]))
        tensor([[-5.0000e-01,  5.0000e-01],
                [-4.2484e-18,  4.2484e-18]], dtype=torch.float64)
    """
    chances = float64(logits).softmax(-1).scatter(-1, labels[..., None], 0.0)
    return chances.scatter(-1, labels[..., None], -chances.sum(-1, keepdim=True))


def log_embedding_constant(counts: Tensor, scale: float = 1.0) -> Tensor:
    """Return, as a logarithm, how far the embedded sequence moves per unit (Frobenius) of the embedding table.

    scale · sqrt(Σ_v count_v²): a sequence of one repeated token moves most.

    Source: docs/theory.md#embedding. Deviation: the paper does not train an embedding in Thm 2.

    Args:
        counts: how often each token id occurs in the sequence, shape (..., vocabulary).
        scale: factor applied to the embedding (sqrt(d) in the paper's code).

    Returns:
        ln of the constant, shape (...), float64.

    Example:
        >>> log_embedding_constant(torch.tensor([3, 4]), scale=2.0).exp()
        tensor(10.0000, dtype=torch.float64)
    """
    return log(scale) + log_root_sum_squares(log(counts))


def log_parameter_bounds(
    blocks: Sequence[BlockConstants], readout: Readout, log_embedding: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the constants λ_g of the loss in each parameter tensor g of the network.

    λ_g = √2 ‖Φ‖₂ · pooling · Π_{s>t} λ_X^(s) · λ_g^(t) for a tensor of block t; √2·max‖pooled‖ and √2 for the
    head's weight and bias; the embedding passes through all blocks.

    Source: paper, Thm 2 (docs/theory.md#network). Deviation: every tensor and bias, not only W, V, P, R.

    Args:
        blocks: constants of the blocks, first to last.
        readout: constants of what follows the last block.
        log_embedding: ln of the embedding's constant, or None if it is not trained.

    Returns:
        ln λ_g, shape (...), by name: "embedding", "block 0 W_q", …, "head weight", "head bias".
    """
    named = _through_network(blocks, [log_parameter_constants(block) for block in blocks], readout)
    if log_embedding is not None:
        through = [log_input_constant(block) for block in blocks]
        named = {"embedding": log_product(log_embedding, readout.log_token_constant, *through)} | named
    named["head weight"] = log_product(log(readout.loss), log(readout.pooled_norm))
    named["head bias"] = log(readout.loss).to(named["head weight"].device)
    return named


def log_paper_parameter_bounds(blocks: Sequence[BlockConstants], readout: Readout) -> dict[str, Tensor]:
    """Return the constants λ_g of the loss in the matrices of the paper's Theorem 2.

    Source: paper, Thm 2 (docs/theory.md#network). Deviation: none, if the blocks hold the paper's
    λ_A and λ_W.

    Args:
        blocks: constants of the blocks, first to last.
        readout: constants of what follows the last block.

    Returns:
        ln λ_g, shape (...), by name: "block 0 W", "block 0 V", "block 0 W_P", "block 0 W_R", …
    """
    return _through_network(blocks, [log_paper_parameter_constants(block) for block in blocks], readout)


def network_bound(log_parameters: dict[str, Tensor], assumptions: Sequence[Assumption] = ()) -> Bound:
    """Return λ_L = sqrt(Σ_g λ_g²), against the Euclidean norm of all parameters at once.

    Source: paper, Thm 2 (docs/theory.md#network). Deviation: none.

    Args:
        log_parameters: ln λ_g by name, from :func:`log_parameter_bounds`.
        assumptions: of the constants, from :func:`network_assumptions`.

    Returns:
        ln λ_L, in the broadcast shape. The bound holds for the inputs and parameters over which the constants were
        measured, and for no others.

    Raises:
        ValueError: if there is no parameter.

    Example:
        >>> print(network_bound({"a": log(3.0), "b": log(4.0)}).log_value.exp())
        tensor(5.0000, dtype=torch.float64)
    """
    if not log_parameters:
        raise ValueError("A network without parameters has no Lipschitz constant in them.")
    stacked = torch.stack(broadcast(*log_parameters.values()))
    return Bound(log_root_sum_squares(stacked, dim=0), tuple(assumptions), "paper, Thm 2")


def network_assumptions(blocks: Sequence[BlockConstants]) -> tuple[Assumption, ...]:
    """Return the assumptions of the blocks' constants, each once.

    Source: docs/theory.md#scope. Deviation: none.

    Args:
        blocks: constants of the blocks.

    Returns:
        The assumptions in order of the blocks.
    """
    return merged(block.assumptions for block in blocks)


def _through_network(
    blocks: Sequence[BlockConstants], inside: Sequence[dict[str, Tensor]], readout: Readout
) -> dict[str, Tensor]:
    """Propagate each block's parameter constants through the blocks above it and the readout."""
    above = readout.log_token_constant
    per_block: list[dict[str, Tensor]] = []
    for t in reversed(range(len(blocks))):
        per_block.append({f"block {t} {name}": log_product(above, value) for name, value in inside[t].items()})
        above = log_product(above, log_input_constant(blocks[t]))
    return {name: value for constants in reversed(per_block) for name, value in constants.items()}
