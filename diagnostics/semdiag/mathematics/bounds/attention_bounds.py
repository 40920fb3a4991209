"""λ_A and λ_M: how far attention outputs move when tokens or the score form change; sound and paper's forms."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.bounds.block_bounds import Assumption, Bound
from semdiag.mathematics.score_strips import AttentionRows
from semdiag.mathematics.softmax_stability import positive_separation
from semdiag.mathematics.spectral_norms import Real, float64, log, log_one_plus_inverse, log_product, log_sum


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """Norms of one attention layer, with one entry per head (or a scalar for a single head)."""

    gamma: Real  # Γ_h, see ``bilinear_form_norm``
    upsilon: Real  # Υ_h, see ``value_output_norm``
    token: Real  # Ξ, largest norm of a token at the attention's input
    query: Real  # Ξ̃, largest norm of the query side, see ``query_norm``

    @property
    def log_form_reach(self) -> Tensor:
        """ln(Γ Ξ Ξ̃), an upper bound of |score| (without b_k)."""
        return log(self.gamma) + log(self.token) + log(self.query)


def attention_map_bound(rows: AttentionRows, selected: Tensor, norms: HeadNorms) -> Bound:
    """Return ln λ_A, (...), of u ↦ (Σ_j p_ij u_j)_i, from each token's own load, with the rows' assumptions.

    λ_A = max_l [ Σ_{i : l∈S_i} p̄_i + Ξ( ΓΞ min(s_l ξ_l, split_l) + ΓΞ̃ Σ_{i : l∈S_i} ξ_i ) ]:
    token l as value, query and key. Rows are (..., L), norms broadcast; ``selected`` is S_i, bool (..., L, L), for
    heavy-hitter masks the union S_i ∪ S'_i over all compared inputs; a map that is not square is a ValueError.

    Source: docs/theory.md#attention-map. Deviation: the paper takes the largest load and one ξ for all rows.

    Example:
        >>> from semdiag.mathematics.score_strips import fixed_mask_rows
        >>> rows = fixed_mask_rows(torch.zeros(4), 4)
        >>> norms = HeadNorms(gamma=0.5, upsilon=1.0, token=2.0, query=2.0)
        >>> attention_map_bound(rows, torch.ones(4, 4, dtype=torch.bool), norms).log_value.exp().item()
        6.0...
    """
    if selected.shape[-1] != selected.shape[-2] or selected.shape[-1] != rows.log_xi.shape[-1]:
        got = f"Got a mask of {tuple(selected.shape[-2:])} and {rows.log_xi.shape[-1]} rows."
        raise ValueError(f"λ_A needs self-attention, with one row of the mask per token. {got}")
    log_gamma = log(norms.gamma)
    log_xi = log(norms.token)
    as_query = log_product((log_gamma + 2 * log_xi)[..., None], rows.log_split)
    as_key = log_product(norms.log_form_reach[..., None], _key_sums(rows.log_xi, selected))
    per_token = log_sum(_key_sums(rows.log_weight, selected), as_query, as_key)
    return Bound(per_token.amax(dim=-1), rows.assumptions, "docs/theory.md#attention-map")


def attention_map_bound_from_load(
    rows: AttentionRows, largest_load: Real, norms: HeadNorms, *, heavy_hitter: bool
) -> Bound:
    """Return ln λ_A, shape (...), from the largest key load alone, without the mask.

    λ_A ≤ l·max_i p̄_i + Ξ( ΓΞ max_i min(s_i ξ_i, split_i) + ΓΞ̃ m l max_i ξ_i ), with l = max_j l_j over all
    inputs, and m = 2 for heavy-hitter masks, else 1. Rows and norms as of :func:`attention_map_bound`.

    Source: docs/theory.md#attention-map. Deviation: coarser than :func:`attention_map_bound`, never smaller.

    Example:
        >>> from semdiag.mathematics.score_strips import fixed_mask_rows
        >>> norms = HeadNorms(gamma=0.5, upsilon=1.0, token=2.0, query=2.0)
        >>> rows = fixed_mask_rows([0.0] * 4, 4)
        >>> attention_map_bound_from_load(rows, 4, norms, heavy_hitter=False).log_value.exp().item()
        6.0...
    """
    log_load = log(largest_load)
    log_xi = log(norms.token)
    as_query = log_product(log(norms.gamma) + 2 * log_xi, rows.log_split.amax(dim=-1))
    union = math.log(2) if heavy_hitter else 0.0
    as_key = log_product(norms.log_form_reach, log_load + union, rows.log_xi.amax(dim=-1))
    log_map = log_sum(log_load + rows.log_weight.amax(dim=-1), as_query, as_key)
    return Bound(log_map, rows.assumptions, "docs/theory.md#attention-map")


def bilinear_form_bound(rows: AttentionRows, norms: HeadNorms) -> Bound:
    """Return ln λ_M, (...): how far a head's outputs, summed over queries, move per unit of its score form M_h.

    λ_M = Υ_h Ξ² Ξ̃ Σ_i min(s_i ξ_i, row_i). For full attention this is Υ Ξ² Ξ̃ L whatever the dispersion is.
    Rows (..., queries) and norms as of :func:`attention_map_bound`.

    Source: docs/theory.md#form. Deviation: the paper has ΥΞ³L e^δ_s, see :func:`paper_bilinear_form_bound`.

    Example:
        >>> from semdiag.mathematics.score_strips import fixed_mask_rows
        >>> norms = HeadNorms(gamma=0.5, upsilon=1.0, token=2.0, query=2.0)
        >>> [round(bilinear_form_bound(fixed_mask_rows([d] * 4, 4), norms).log_value.exp().item(), 6)
        ...  for d in (0.0, 90.0)]
        [32.0, 32.0]
    """
    log_reach = log(norms.upsilon) + 2 * log(norms.token) + log(norms.query)
    log_form = log_product(log_reach, rows.log_row.logsumexp(dim=-1))
    return Bound(log_form, rows.assumptions, "docs/theory.md#form")


def _key_sums(log_values: Tensor, selected: Tensor) -> Tensor:
    """Return ln Σ_{i : l ∈ S_i} value_i (..., keys) over the queries that use a key; −∞ if none does."""
    return torch.where(selected, log_values[..., None], -math.inf).logsumexp(dim=-2)


def paper_attention_map_bound(
    dispersion: Real, norms: HeadNorms, load_ratio: Real = 1.0, separation: Real | None = None
) -> Bound:
    """Return ln λ_A, the paper's constant of the attention map in its input, in the broadcast shape.

    Full attention (β = 1) and fixed masks: e^δ [β + ΓΞ²(1 + β)];
    heavy-hitter masks: e^δ_h [β + 2ΓΞ²(1 + β)(1 + 1/Δ_h)], +inf where Δ_h ≤ 0.
    δ is the queries' largest, Δ_h their smallest (or percentiles), nats; None for fixed masks; β = max_j l_j / k.

    Source: paper, Thm 2 with Thm 4 (fixed masks) and Thm 5 (docs/theory.md#paper-attention). Deviation: none.

    Example:
        >>> norms = HeadNorms(gamma=0.5, upsilon=1.0, token=1.0, query=1.0)
        >>> paper_attention_map_bound(0.0, norms).log_value.exp().item()
        2.0
    """
    log_beta = log(load_ratio)
    log_scores = log(norms.gamma) + 2 * log(norms.token) + torch.log1p(float64(load_ratio))
    log_factor, assumptions = _mask_factor(separation)
    log_map = float64(dispersion) + log_sum(log_beta, log_scores + log_factor)
    return Bound(log_map, (*assumptions, _no_query_bias(norms)), "paper, Thm 2")


def paper_bilinear_form_bound(
    dispersion: Real, norms: HeadNorms, tokens: Real, separation: Real | None = None
) -> Bound:
    """Return ln λ_W, the paper's constant of the attention outputs in W, the score form.

    Full attention and fixed masks: ΥΞ³L e^δ; heavy-hitter masks: 2ΥΞ³L e^δ_h (1 + 1/Δ_h), +inf where Δ_h ≤ 0.
    Arguments as of :func:`paper_attention_map_bound`; ``tokens`` is L.

    Source: paper, Thm 2 with Thm 4 (fixed masks) and Thm 5 (docs/theory.md#paper-attention). Deviation: none.

    Example:
        >>> norms = HeadNorms(gamma=0.5, upsilon=1.0, token=2.0, query=2.0)
        >>> paper_bilinear_form_bound(0.0, norms, tokens=4).log_value.exp()
        tensor(32.0000, dtype=torch.float64)
    """
    log_factor, assumptions = _mask_factor(separation)
    log_form = log(norms.upsilon) + 3 * log(norms.token) + log(tokens) + float64(dispersion) + log_factor
    return Bound(log_form, (*assumptions, _no_query_bias(norms)), "paper, Thm 2")


def _mask_factor(separation: Real | None) -> tuple[Tensor, tuple[Assumption, ...]]:
    """Return ln 2(1 + 1/Δ_h) for heavy-hitter masks, 0 for fixed ones."""
    if separation is None:
        return float64(0.0), ()
    gap = float64(separation)
    return math.log(2) + log_one_plus_inverse(gap.clamp(min=0)), (positive_separation(gap),)


def _no_query_bias(norms: HeadNorms) -> Assumption:
    alike = float64(norms.query) == float64(norms.token)
    return Assumption("the query projection has no bias", {}, holds=bool(alike.all()))
