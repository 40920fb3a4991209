"""Evaluated inputs in each block: norms, stabilities and masks behind the bounds; bounds of score gradients."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing.attention_call import HEAVY_HITTERS, rows_of_kind
from semdiag.capturing.attention_calls import BlockCall, watch_blocks
from semdiag.capturing.batches import Batch
from semdiag.mathematics.bounds.attention_bounds import HeadNorms, attention_map_bound, bilinear_form_bound
from semdiag.mathematics.bounds.block_bounds import query_norm
from semdiag.mathematics.bounds.network_bounds import score_gradient_sums
from semdiag.mathematics.spectral_norms import log, log_root_sum_squares
from semdiag.measuring.calls.collector import ScoredRows, scored_rows
from semdiag.measuring.encoders.weights import block_weights
from semdiag_files import InputError
from semdiag_models import Encoder

MLP_NORM_EPS = 1e-5  # eps of the normalisation before the MLP (pre-norm) or after it (post-norm)
_SCORES = 2**22  # largest number of scores in one forward pass (or one sample's)


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """Quantities of the evaluated inputs in one block: one entry per sample (and head), without padding."""

    token_norm: Tensor  # (N,) Ξ, largest norm at the attention's input
    score_reach: Tensor  # (N,) largest |scale|·‖q‖·‖k‖, a bound of the scores and so of their rounding
    attention_std: Tensor  # (N,) smallest sqrt(var + eps) that the first normalisation sees
    mlp_std: Tensor  # (N,) the same for the second normalisation
    mlp_token_norm: Tensor  # (N,) Ξ_P, largest norm at the MLP's input
    hidden_norm: Tensor  # (N,) largest norm at the MLP's second matrix
    log_map: Tensor  # (N, H) ln λ_A; +inf if the kind of attention is not covered, or Δ ≤ 0
    log_form: Tensor  # (N, H) ln λ_M
    dispersion: Tensor  # (N, H) largest δ of a query
    separation: Tensor  # (N, H) smallest Δ of a query
    not_positive: Tensor  # (N, H) int64, queries with Δ ≤ 0
    not_finite: Tensor  # (N, H) int64, queries with a NaN or infinite score; their sample has no constant
    load: Tensor  # (N, H) int64, largest key load


@dataclass(frozen=True, eq=False)
class InputTraces:
    """Quantities of the evaluated inputs, layer by layer."""

    layers: Sequence[LayerTrace]  # one trace per block
    tokens: Tensor  # (N,) int64, number of tokens that are not padding, CLS and global tokens included
    counts: Tensor  # (N, rows of the embedding) int64, number of occurrences of each token id among them
    pooled_norm: Tensor  # (N,) norm of the pooled representation
    logits: Tensor  # (N, classes) logits of the head


def trace_inputs(encoder: Encoder, tokens: Tensor) -> InputTraces:
    """Run the inputs and measure, input by input, everything that the bounds need."""
    tracer = _Tracer(encoder)
    length = tokens.shape[1] + encoder.config.extra_tokens
    per_pass = max(1, _SCORES // (encoder.config.heads * length**2))
    pool = encoder.head.register_forward_hook(tracer.pool)
    with pool, torch.inference_mode(), watch_blocks(encoder, tracer.add):
        for batch in torch.split(tokens, per_pass):
            tracer.start(batch)
            encoder(batch)
    return tracer.result()


class _Tracer:
    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.kind = encoder.config.attention
        self.weights = [block_weights(encoder, layer) for layer in range(len(encoder.blocks))]
        self.norms = [(w.gamma, w.upsilon) for w in self.weights]
        self.layers: list[list[dict[str, Tensor]]] = [[] for _ in self.weights]
        self.whole: dict[str, list[Tensor]] = {"tokens": [], "counts": [], "pooled_norm": [], "logits": []}
        self.valid = torch.ones(0, dtype=torch.bool)

    def start(self, batch: Tensor) -> None:
        valid = self.encoder.valid(batch)
        sequence = self.encoder.sequence(batch)
        self.valid = torch.ones_like(sequence, dtype=torch.bool) if valid is None else valid
        ids = F.one_hot(sequence, self.encoder.embedding.num_embeddings)
        self.whole["tokens"].append(self.valid.sum(-1))
        self.whole["counts"].append((ids * self.valid[..., None]).sum(1))

    def pool(self, head: nn.Module, inputs: tuple[Tensor], logits: Tensor) -> None:
        self.whole["pooled_norm"].append(inputs[0].norm(dim=-1))
        self.whole["logits"].append(logits)

    def add(self, call: BlockCall) -> None:
        eps = float(self.encoder.blocks[call.layer].attention_norm_eps)  # type: ignore[arg-type]
        pre = self.encoder.config.norm == "pre"
        streams = (call.stream, call.middle) if pre else (call.middle, call.end)
        q, k = (heads.norm(dim=-1).amax(1) for heads in (call.attention.q, call.attention.k))
        norms = {
            "token_norm": self._largest(call.tokens.norm(dim=-1)),
            "score_reach": abs(call.attention.scale) * self._largest(q) * self._largest(k),
            "attention_std": -self._largest(-token_std(streams[0], eps)),
            "mlp_std": -self._largest(-token_std(streams[1], MLP_NORM_EPS)),
            "mlp_token_norm": self._largest(call.mlp_tokens.norm(dim=-1)),
            "hidden_norm": self._largest(call.hidden.norm(dim=-1)),
        }
        rows = scored_rows(call.attention)
        self.layers[call.layer].append(norms | self._attention(call.layer, rows, norms["token_norm"]))

    def _largest(self, values: Tensor) -> Tensor:
        """Return the largest value of each sample's tokens: (B, L) -> (B,)."""
        return values.masked_fill(~self.valid, -math.inf).amax(-1)

    def _attention(self, layer: int, rows: ScoredRows, token_norm: Tensor) -> dict[str, Tensor]:
        finite = rows.dispersion.isfinite()
        statistics = {
            "dispersion": rows.dispersion.amax(-1),
            "separation": rows.separation.amin(-1),
            "not_positive": (rows.separation <= 0).sum(-1),
            "not_finite": (~finite).sum(-1),
            "load": rows.selected.sum(-2).amax(-1),
        }
        delta = rows.dispersion.where(finite, 0.0)
        gap = rows.separation.where(finite, math.inf)
        constants = rows_of_kind(self.kind, delta, gap, rows.kept.where(finite, 0))
        if constants is None:
            nothing = torch.full_like(statistics["dispersion"], math.inf)
            return statistics | dict.fromkeys(("log_map", "log_form"), nothing)
        xi = token_norm[:, None]
        norms = HeadNorms(*self.norms[layer], xi, query_norm(xi))
        united = constants  # over the union of two masks, which doubles a token's sums for heavy hitters
        if self.kind in HEAVY_HITTERS:
            double = math.log(2)
            united = replace(united, log_weight=united.log_weight + double, log_xi=united.log_xi + double)
        bounds = attention_map_bound(united, rows.selected, norms), bilinear_form_bound(constants, norms)
        log_map, log_form = (bound.log_value.where(finite.all(-1), math.inf) for bound in bounds)
        return statistics | {"log_map": log_map, "log_form": log_form}

    def result(self) -> InputTraces:
        layers = [{name: torch.cat([part[name] for part in parts]) for name in parts[0]} for parts in self.layers]
        inputs = {name: torch.cat(parts) for name, parts in self.whole.items()}
        return InputTraces([LayerTrace(**layer) for layer in layers], **inputs)


def token_std(x: Tensor, eps: float) -> Tensor:
    """Return sqrt(var + eps) of each token."""
    return (x.var(-1, unbiased=False) + eps).sqrt()


_MOMENTS = 2**20  # largest number of scores or of covariances' entries in one pass (or one sample's)
BOUNDED_TENSORS = ("attention.q.weight", "attention.q.bias", "attention.k.weight")


def score_gradient_bounds(encoder: Encoder, tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """Bound the gradient of the mean cross-entropy in W_q, b_q and W_k of every block at this point."""
    config = encoder.config
    length = tokens.shape[1] + encoder.config.extra_tokens
    per_pass = max(1, _MOMENTS // (config.heads * length * max(length, config.width * config.head_width)))
    sums = torch.zeros(len(encoder.blocks), len(BOUNDED_TENSORS), encoder.config.heads).to(tokens.device).double()
    for ids, classes in zip(torch.split(tokens, per_pass), torch.split(labels, per_pass), strict=True):
        calls: list[BlockCall] = []
        with torch.enable_grad(), _mixed_values(encoder) as mixed, watch_blocks(encoder, calls.append):
            loss = F.cross_entropy(encoder(ids), classes, reduction="sum") / len(tokens)
        for call, cotangents in zip(calls, torch.autograd.grad(loss, mixed), strict=True):
            attention = call.attention
            with torch.no_grad():
                vectors = (attention.q, attention.k, attention.v)
                weights = scored_rows(attention).weights
                sums[call.layer] += score_gradient_sums(weights, vectors, call.tokens, cotangents, attention.scale)
    logs = log_root_sum_squares(log(sums)).tolist()
    return {
        f"blocks.{layer}.{name}": value
        for layer, values in enumerate(logs)
        for name, value in zip(BOUNDED_TENSORS, values, strict=True)
    }


@contextmanager
def _mixed_values(encoder: Encoder) -> Iterator[list[Tensor]]:
    """Collect, in the context, the output of each block's attention, with its graph."""
    outputs: list[Tensor] = []
    with ExitStack() as stack:
        for layer in range(len(encoder.blocks)):
            hook = encoder.attention(layer).core.register_forward_hook
            stack.enter_context(hook(lambda core, inputs, output: outputs.append(output)))
        yield outputs


def fitting(k: Sequence[int], longest: int, limit_name: str) -> list[int]:
    """Return those of several k that do not exceed the number of keys."""
    fits = [value for value in k if value <= longest]
    if min(k) < 1 or not fits:
        raise InputError(f"k must lie in 1 … {longest}, {limit_name}. Got k={min(k)}.")
    return fits


def checked_tokens(encoder: Encoder, batches: Sequence[Batch], k: Sequence[int]) -> list[Tensor]:
    """Return an encoder's inputs as int64, after checking them."""
    config = encoder.config
    tokens = [checked_batch(encoder, batch) for batch in batches]
    padding_counts = config.pad_as_token or config.extra_tokens
    if not padding_counts and all(bool((batch == config.pad_id).all()) for batch in tokens):
        raise InputError("There is no query to measure: all input tokens are PAD.")
    if k:
        fitting(k, max(batch.shape[1] for batch in tokens), "the length of the inputs")
    return tokens


def checked_batch(encoder: Encoder, batch: Batch) -> Tensor:
    """Return a batch of an encoder's inputs as int64, after checking it."""
    config = encoder.config
    expected = "Inputs must be whole token ids of shape (N, L). Got"
    if not isinstance(batch, Tensor):
        raise InputError(f"{expected} {type(batch).__name__}.")
    if batch.ndim != 2 or batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool:
        raise InputError(f"{expected} {batch.dtype} {tuple(batch.shape)}.")
    if not 1 <= batch.shape[1] <= config.length:
        raise InputError(f"The model takes inputs of length 1 to {config.length}. Got length {batch.shape[1]}.")
    low = int(batch.min())
    high = int(batch.max())
    if low < 0 or high >= config.vocabulary_size:
        outside = low if low < 0 else high
        raise InputError(f"Token id {outside} is out of range: the model knows 0 to {config.vocabulary_size - 1}.")
    return batch.to(torch.int64)
