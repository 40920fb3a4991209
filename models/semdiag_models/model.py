"""The compact encoder: embedding, blocks of attention and MLP, pooling, linear head."""

import math
from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models import fast_attention
from semdiag_models.config import ModelConfig
from semdiag_models.fast_attention import dropout, selection_bias
from semdiag_models.kinds import ATTENTIONS
from semdiag_models.selection import SELECTORS, Indexer, first_centroids

INDEXER_FACTOR = 10.0  # on divergences, which are small: near uniform attention an indexer hardly moves otherwise
ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "mish": F.mish}


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, p: float = 0.0) -> Tensor:
    """Return softmax(scale · q kᵀ) v over the valid keys, with dropout on the weights: (B, H, L, D)."""
    scores = scale * (q @ k.mT)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], -math.inf)
    return dropout(scores.softmax(-1), p, training=p > 0) @ v


def attend_selected(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, p: float = 0.0) -> Tensor:
    """Return :func:`attend` over the selected keys alone, whose positions are (B, H, L, K), -1 for none."""
    missing = selected < 0
    width = q.shape[-1]
    rows = selected.clamp(min=0).flatten(-2)[..., None].expand(*selected.shape[:2], -1, width)  # (B, H, L·K, D)
    keys, values = (t.gather(2, rows).view(*selected.shape, width) for t in (k, v))  # (B, H, L, K, D)
    scores = (scale * q[..., None, :] * keys).sum(-1).masked_fill(missing, torch.finfo(q.dtype).min)
    weights = dropout(scores.softmax(-1).masked_fill(missing, 0), p, training=p > 0)
    return (weights[..., None] * values).sum(-2)


def attend_straight_through(
    q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor, p: float
) -> Tensor:
    """Mix values with the weights of the selected keys, but differentiate scores with the weights of all keys."""
    scores = scale * (q @ k.mT)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], torch.finfo(q.dtype).min)
    dense_weights = scores.softmax(-1)
    with torch.no_grad():
        selected_weights = (scores + selection_bias(selected, k)).softmax(-1).nan_to_num_(0.0)
    weights = selected_weights + (dense_weights - dense_weights.detach())  # the difference is 0, exactly
    return dropout(weights, p, training=p > 0) @ v


class AttentionCore(nn.Module):
    """Softmax attention over selected keys. The single hook point: its inputs determine the attention."""

    def __init__(self, config: ModelConfig, fast: bool = True) -> None:
        super().__init__()
        self.p = config.dropout
        self.everywhere = config.everywhere  # numbers of tokens at the start and the end that attend to all keys
        self.straight_through = config.score_gradient == "straight-through"
        self.cls_hidden = not config.cls_as_key  # whether only the first query attends to the first token
        self.fast = fast

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor | None
    ) -> Tensor:
        """Mix the values."""
        p = self.p if self.training else 0.0
        if selected is None:
            return self.attend(q, k, v, scale, valid, p)
        if self.straight_through and self.training:
            return attend_straight_through(q, k, v, scale, valid, selected, p)
        mixed = self.attend_selected(q, k, v, scale, selected, p)
        first, last = self.everywhere
        if first + last == 0:
            return mixed
        end = q.shape[2] - last
        rows = torch.cat([q[:, :, :first], q[:, :, end:]], 2)
        dense = self.attend(rows, k, v, scale, valid, p)
        return torch.cat([dense[:, :, :first], mixed[:, :, first:end], dense[:, :, first:]], 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, p: float) -> Tensor:
        """Mix the values of all valid keys."""
        return (fast_attention.dense_attention if self.fast else attend)(q, k, v, scale, valid, p)

    def attend_selected(self, q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, p: float) -> Tensor:
        """Mix the values of the selected keys: (B, H, L, D), … -> (B, H, L, D)."""
        if not self.fast:
            return attend_selected(q, k, v, scale, selected, p)
        if fast_attention.uses_masked_matrices(self, q):
            return fast_attention.masked_attention(q, k, v, scale, selected, p)
        return fast_attention.selected_attention(q, k, v, scale, selected, p)


class Attention(nn.Module):
    """Multi-head attention with biases; every head is ``head_width`` wide."""

    centroids: Tensor | None
    indexer: Indexer | None

    def __init__(self, config: ModelConfig, layer: int = 0, fast: bool = True) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.draw_seed: int | None = None  # see Encoder.with_draws
        self.scale = config.inverse_temperature / math.sqrt(config.head_width)
        inner = config.heads * config.head_width
        self.qkv = nn.Linear(config.width, 3 * inner)
        self.core = AttentionCore(config, fast)
        self.out = nn.Linear(inner, config.width)
        centroids = None  # state of routing attention, not a parameter; every training step moves it
        if config.clusters is not None:
            size = (config.heads, config.clusters, config.head_width)
            centroids = first_centroids(config.selection_seed, layer, size)
        self.register_buffer("centroids", centroids)
        self.indexer = None  # of attention of that kind; the encoder draws it last

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Attend: (B, L, d), (B, L) or None -> (B, L, d)."""
        size = *x.shape[:2], self.config.heads, self.config.head_width
        q, k, v = (t.view(size).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))  # each (B, H, L, D)
        mixed = self.core(q, k, v, self.scale, valid, self.select(q, k, valid))
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def select(self, q: Tensor, k: Tensor, valid: Tensor | None) -> Tensor | None:
        """Return the positions of the keys that each query attends to (B, H, L, K); None for all keys."""
        selector = SELECTORS.get(self.config.attention)
        return None if selector is None else selector(q, k, valid, self)


class Block(nn.Module):
    """Pre-norm: x + drop(attention(norm(x))), then x + drop(mlp(norm(x))); post-norm: norm(x + …), twice."""

    def __init__(self, config: ModelConfig, layer: int, fast: bool = True) -> None:
        super().__init__()
        self.config = config
        self.attention_norm_eps = config.first_norm_eps if layer == 0 else 1e-5
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.attention = Attention(config, layer, fast)
        self.expand = nn.Linear(config.width, config.mlp_width)
        self.contract = nn.Linear(config.mlp_width, config.width)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Transform the residual stream: (B, L, d) -> (B, L, d)."""
        p = self.config.dropout
        if self.config.norm == "pre":
            attended = self.attention(self.normalised(x, self.attention_norm_eps), valid)
            x = dropout(attended, p, self.training, residual=x)
            return dropout(self.mlp(self.normalised(x)), p, self.training, residual=x)
        x = dropout(self.attention(x, valid), p, self.training, residual=x)
        x = self.normalised(x, self.attention_norm_eps)
        return self.normalised(dropout(self.mlp(x), p, self.training, residual=x))

    def normalised(self, x: Tensor, eps: float = 1e-5) -> Tensor:
        """Return the layer norm, without scale and shift."""
        return F.layer_norm(x, (self.config.width,), eps=eps)

    def mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's output, with dropout before the activation."""
        hidden = dropout(self.expand(x), self.config.dropout, self.training)
        return self.contract(self.activation(hidden))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The classifier of the paper's experiments; ``fast=False`` has attention in elementary operations."""

    positions: Tensor

    def __init__(self, config: ModelConfig, fast: bool = True) -> None:
        super().__init__()
        self.config = config
        symbols = config.vocabulary_size + config.extra_tokens
        # Filling a tensor without memory would load torch's compiler, which takes a second.
        unfilled = torch.empty(symbols, config.width) if torch.empty(()).is_meta else None
        self.embedding = nn.Embedding(symbols, config.width, _weight=unfilled)
        self.blocks = nn.ModuleList(Block(config, layer, fast) for layer in range(config.blocks))
        self.head = nn.Linear(config.width, config.classes)
        longest = config.length + config.extra_tokens
        self.register_buffer("positions", sinusoids(longest, config.width), persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        if ATTENTIONS[config.attention].keeps == "indexed":
            self._draw_indexers()

    def _draw_indexers(self) -> None:
        """Give every block its indexer; all other weights and draws stay those of full attention."""
        with torch.random.fork_rng(devices=[]):
            for layer in range(self.config.blocks):
                shape = self.config.heads, self.config.head_width
                self.attention(layer).indexer = Indexer(shape, self.config.heads, self.config.indexer_width)

    def indexers(self) -> list[Indexer]:
        """Return the indexers of the blocks, if their attention has any."""
        layers = (self.attention(layer) for layer in range(self.config.blocks))
        return [layer.indexer for layer in layers if layer.indexer is not None]

    def take_divergence(self) -> Tensor | float:
        """Return, once, what indexers minimise: the sum of the last divergences, times a factor; else 0."""
        total: Tensor | float = 0.0
        for indexer in self.indexers():
            if indexer.divergence is not None:
                total = total + INDEXER_FACTOR * indexer.divergence
                indexer.divergence = None
        return total

    def gradient_groups(self) -> list[list[Tensor]]:
        """Return the parameters whose gradients are clipped together: the indexers' apart from all others."""
        groups: dict[bool, list[Tensor]] = {False: [], True: []}
        for name, parameter in self.named_parameters():
            groups[".indexer." in name].append(parameter)
        return [group for group in groups.values() if group]

    def attention(self, layer: int) -> Attention:
        """Return the attention of a block, counted from 0."""
        return self.blocks[layer].attention  # type: ignore[return-value]

    @torch.no_grad()
    def scale_queries_and_keys(self, factor: float) -> None:
        """Multiply W_q, W_k and their biases, which multiplies scores and δ by the square of the factor."""
        for layer in range(self.config.blocks):
            for parameter in self.attention(layer).qkv.parameters():
                parameter[: 2 * self.config.heads * self.config.head_width].mul_(factor)

    def with_exact_positions(self) -> Self:
        """Replace the trainer's positions by positions that are the same on every processor."""
        length, width = self.positions.shape
        self.positions.copy_(sinusoids(length, width, torch.float64))
        return self

    def with_draws(self, seed: int) -> Self:
        """Make redrawn attention keep the same random keys in every evaluation, so that it can be measured."""
        for layer in range(self.config.blocks):
            self.attention(layer).draw_seed = seed
        return self

    def forward(self, tokens: Tensor, padded: bool | None = None) -> Tensor:
        """Classify."""
        x = self.embed(tokens)
        valid = self.valid(tokens, padded)
        for block in self.blocks:
            x = block(x, valid)
        return self.classify(x, valid)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the scaled embedding plus sinusoidal positions: (B, L) -> (B, L + extra tokens, d)."""
        config = self.config
        length = tokens.shape[1]
        positions = self.positions
        if config.global_tokens and length < config.length:  # global tokens keep the last positions
            front = positions[: config.cls_tokens + length]
            positions = torch.cat([front, positions[config.cls_tokens + config.length :]])
        x = self.embedding(self.sequence(tokens)) * math.sqrt(config.width)
        return dropout(x + positions[: length + config.extra_tokens], config.dropout, self.training)

    def sequence(self, tokens: Tensor) -> Tensor:
        """Return the ids of all tokens that attention sees: CLS, the input, the global tokens."""
        config = self.config
        if not config.extra_tokens:
            return tokens
        ids = (
            torch.arange(config.extra_tokens, device=tokens.device).add(config.pad_id + 1).expand(len(tokens), -1)
        )
        return torch.cat([ids[:, config.global_tokens :], tokens, ids[:, : config.global_tokens]], 1)

    def valid(self, tokens: Tensor, padded: bool | None = None) -> Tensor | None:
        """Return which tokens of :meth:`sequence` count; None for all of them."""
        config = self.config
        if config.pad_as_token or padded is False:
            return None
        valid = tokens != config.pad_id
        if padded is None and bool(valid.all()):
            return None
        return (
            F.pad(valid, (config.cls_tokens, config.global_tokens), value=True) if config.extra_tokens else valid
        )

    def classify(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return logits (B, classes) from the last block's output (B, L + extra tokens, d) and :meth:`valid`."""
        if self.config.cls_tokens:
            pooled = x[:, 0]
        elif valid is None:
            pooled = x.mean(1)
        else:
            pooled = (x * valid[:, :, None]).sum(1) / valid.sum(1, keepdim=True)
        return self.head(pooled)  # type: ignore[no-any-return]


def sinusoids(length: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return positions: sines in even channels, cosines in odd ones, base 10000."""
    if torch.empty(()).is_meta:
        return torch.empty(length, width, dtype=dtype)
    channels = torch.arange(0, width, 2, dtype=dtype)
    angle = torch.arange(length)[:, None] * torch.exp(channels * (-math.log(10000) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).view(length, width)
