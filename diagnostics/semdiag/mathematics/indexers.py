"""Learned indexers: scores of keys from small heads, in the forms in which engines compute them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semdiag.mathematics.block_formats import quantised
from semdiag.mathematics.rounding import FORMATS, rounded


@dataclass(frozen=True)
class IndexerForm:
    """How an indexer turns projected queries and keys into scores; each field has a usual wrong value in ports."""

    rotary: str = "halves"  # rotated pairs: ``halves`` (i, i + R/2), ``interleaved`` (2i, 2i + 1), ``none``
    at_end: bool = False  # whether the last R numbers of a head are rotated, and not the first
    direction: int = 1  # of the rotation; -1 turns the other way
    query_shift: int = 0  # added to the positions of queries
    key_shift: int = 0  # added to the positions of keys
    base: float | None = None  # of the angles, base^(-2i/R) a position; None: as recorded
    norm: str = "layer"  # of keys: ``layer``, ``rms``, ``none``
    affine: bool = True  # whether the norm has its weight and bias
    eps: float | None = None  # of the norm; None: as recorded
    heads: str = "weighted"  # ``weighted``, ``equal``, ``softmax`` of the weights, ``reversed``
    relu: str = "each"  # ReLU of ``each`` head, of their ``sum``, or ``none``
    total: str = "sum"  # over heads: ``sum`` or ``max``
    ahead: int = 0  # last key that a query may choose, from its own position
    chunk: int = 0  # keys are those of the query's chunk of that many positions alone; 0: all
    causal: bool = True
    operands: str = ""  # format to which rotated queries and keys are rounded; empty: none
    scores: str = ""  # format to which scores are rounded; empty: none


@dataclass(frozen=True)
class IndexerInputs:
    """What an indexer computed of one sequence before its norm and its rotation."""

    queries: Tensor  # (T, H, D), projected
    keys: Tensor  # (T, D), projected, before the norm
    head_weights: Tensor  # (T, H), with all scales
    cos: Tensor  # (T, R), both halves alike
    sin: Tensor  # (T, R)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor  # (D,)
    eps: float
    positions: Tensor  # int64 (T,), of the tokens in their sequence

    def double(self) -> "IndexerInputs":
        """Return the same numbers in float64."""
        return replace(
            self, queries=self.queries.double(), keys=self.keys.double(), head_weights=self.head_weights.double(),
            cos=self.cos.double(), sin=self.sin.double(), norm_weight=self.norm_weight.double(),
            norm_bias=self.norm_bias.double(),
        )  # fmt: skip


def index_scores(inputs: IndexerInputs, form: IndexerForm, rows: Tensor | None = None) -> Tensor:
    """Return the scores of each query's keys, (rows, T), -inf where the form forbids a key.

    Formula: I_ts = Σ_h w_th ReLU(R_t q_th · R_s norm(k_s)), R the rotation by position; head scales stand in w.

    Source: DeepSeek-V3.2, eq. 1; not in the paper. Deviation: what the fields of the form say.

    Args:
        inputs: of one sequence of T tokens.
        form: how they become scores.
        rows: int64, the queries; None for all.

    Example:
        >>> ones = torch.ones(2, 2)
        >>> inputs = IndexerInputs(torch.ones(2, 1, 2), ones, ones[:, :1], ones[:, :0], ones[:, :0], ones[0],
        ...     ones[0], 1e-6, torch.arange(2))
        >>> index_scores(inputs, IndexerForm(norm="none")).tolist()
        [[2.0, -inf], [2.0, 2.0]]
    """
    at = torch.arange(len(inputs.keys)) if rows is None else rows
    queries = _rotated(inputs.queries[at], inputs, form, form.query_shift, at)
    keys = _rotated(_normed(inputs, form)[:, None], inputs, form, form.key_shift, torch.arange(len(inputs.keys)))
    if form.operands:
        queries = quantised(queries, form.operands)
        keys = quantised(keys, form.operands)
    scores = _over_heads(torch.einsum("thd,sd->ths", queries, keys[:, 0]), inputs.head_weights[at], form)
    if form.scores:
        scores = rounded(scores, FORMATS[form.scores]).to(scores.dtype)
    return scores.masked_fill(~allowed_by(form, inputs.positions, at), -torch.inf)


def allowed_by(form: IndexerForm, positions: Tensor, rows: Tensor) -> Tensor:
    """Return which keys each query may choose, bool (rows, T)."""
    query = positions[rows, None]
    allowed = torch.ones(len(rows), len(positions), dtype=torch.bool)
    if form.causal:
        allowed &= positions <= query + form.ahead
    if form.chunk:
        allowed &= positions // form.chunk == query // form.chunk
    return allowed


def _normed(inputs: IndexerInputs, form: IndexerForm) -> Tensor:
    keys = inputs.keys
    eps = inputs.eps if form.eps is None else form.eps
    if form.norm == "layer":
        keys = keys - keys.mean(-1, keepdim=True)
    if form.norm != "none":
        keys = keys * (keys.square().mean(-1, keepdim=True) + eps).rsqrt()
    if form.norm == "none" or not form.affine:
        return keys
    return keys * inputs.norm_weight + inputs.norm_bias


def _rotated(heads: Tensor, inputs: IndexerInputs, form: IndexerForm, shift: int, rows: Tensor) -> Tensor:
    """Return (rows, H, D) with R of the D numbers rotated by the tokens' positions."""
    width = inputs.cos.shape[-1]
    if form.rotary == "none" or not width:
        return heads
    cos, sin = _angles(inputs, form, shift, rows)
    start = heads.shape[-1] - width if form.at_end else 0
    turned = _turned(
        heads[..., start : start + width],
        cos[:, None],
        form.direction * sin[:, None],
        form.rotary == "interleaved",
    )
    return torch.cat([heads[..., :start], turned, heads[..., start + width :]], -1)


def _turned(numbers: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = numbers.shape[-1] // 2
    first = numbers[..., ::2] if interleaved else numbers[..., :half]
    second = numbers[..., 1::2] if interleaved else numbers[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _angles(inputs: IndexerInputs, form: IndexerForm, shift: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (rows, R/2) of the queries' or keys' positions, moved or of another base."""
    half = inputs.cos.shape[-1] // 2
    cos = inputs.cos[rows, :half]
    sin = inputs.sin[rows, :half]
    if form.base is not None:
        rate = form.base ** (-torch.arange(half, dtype=cos.dtype) / half)
        angle = (inputs.positions[rows, None] + shift) * rate
        return angle.cos(), angle.sin()
    if not shift:
        return cos, sin
    step_cos, step_sin = _step(inputs, half)
    angle = shift * torch.atan2(step_sin, step_cos)
    return cos * angle.cos() - sin * angle.sin(), sin * angle.cos() + cos * angle.sin()


def _step(inputs: IndexerInputs, half: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles by which one position turns; recorded scales of both cancel."""
    if len(inputs.cos) < 2:
        return torch.ones_like(inputs.cos[0, :half]), torch.zeros_like(inputs.cos[0, :half])
    cos = inputs.cos[:2, :half]
    sin = inputs.sin[:2, :half]
    return cos[1] * cos[0] + sin[1] * sin[0], sin[1] * cos[0] - cos[1] * sin[0]


def _over_heads(products: Tensor, weights: Tensor, form: IndexerForm) -> Tensor:
    """Return the scores (rows, T) of products (rows, H, T) and the heads' weights (rows, H)."""
    if form.relu == "each":
        products = products.relu()
    if form.heads == "equal":
        weights = torch.ones_like(weights)
    elif form.heads == "softmax":
        weights = weights.softmax(-1)
    elif form.heads == "reversed":
        weights = weights.flip(-1)
    weighted = products * weights[..., None]
    scores = weighted.amax(1) if form.total == "max" else weighted.sum(1)
    return scores.relu() if form.relu == "sum" else scores
