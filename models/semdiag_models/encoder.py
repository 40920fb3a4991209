"""The compact encoder: attention, blocks, embedding, pooling, linear head."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models.attention import ATTENTIONS, AttentionCore, dropout, first_centroids
from semdiag_models.config import ModelConfig


def sinusoids(length: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return positions: sines in even channels, cosines in odd ones, base 10000."""
    if torch.empty(()).is_meta:
        return torch.empty(length, width, dtype=dtype)
    channels = torch.arange(0, width, 2, dtype=dtype)
    angle = torch.arange(length)[:, None] * torch.exp(channels * (-math.log(10000) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).view(length, width)


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "mish": F.mish}


class Affine(nn.Linear):
    """A linear layer; its parameters may be those of several models (G, out, in)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b: (…, in) -> (…, out)."""
        if self.weight.ndim == 2:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(len(self.weight), -1, x.shape[-1])
        return torch.baddbmm(self.bias[:, None], rows, self.weight.mT).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Multi-head attention with biases; every head is ``head_width`` wide."""

    centroids: Tensor | None

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.heads, self.head_width, self.kind = config.heads, config.head_width, config.attention
        self.draw_seed: int | None = None  # see Encoder.with_draws
        self.scale = config.inverse_temperature / math.sqrt(config.head_width)
        inner = config.heads * config.head_width
        self.qkv = Affine(config.width, 3 * inner)
        self.core = AttentionCore(config.dropout, config.everywhere, config.score_gradient == "straight-through")
        self.core.apart = not config.cls_as_key
        self.out = Affine(inner, config.width)
        centroids = None  # state of routing attention, not a parameter; every training step moves it
        if config.clusters is not None:
            size = (config.heads, config.clusters, config.head_width)
            centroids = first_centroids(config.selection_seed, layer, size)
        self.register_buffer("centroids", centroids)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Attend: (B, L, d), (B, L) or None -> (B, L, d)."""
        size = *x.shape[:2], self.heads, self.head_width
        q, k, v = (t.view(size).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))  # each (B, H, L, D)
        mixed = self.core(q, k, v, self.scale, valid, self.select(q, k, valid))
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def select(self, q: Tensor, k: Tensor, valid: Tensor | None) -> Tensor | None:
        """Return the positions of the keys that each query attends to (B, H, L, K), by the table of kinds."""
        function = ATTENTIONS[self.kind].select
        return None if function is None else function(q, k, valid, self)


class Block(nn.Module):
    """Pre-norm: x + drop(attention(norm(x))), then x + drop(mlp(norm(x))); post-norm: norm(x + …), twice."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.width, self.p, self.pre_norm = config.width, config.dropout, config.norm == "pre"
        self.attention_norm_eps = config.first_norm_eps if layer == 0 else 1e-5
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.attention = Attention(config, layer)
        self.expand = Affine(config.width, config.mlp_width)
        self.contract = Affine(config.mlp_width, config.width)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Transform the residual stream: (B, L, d) -> (B, L, d)."""
        norm, eps = partial(F.layer_norm, normalized_shape=(self.width,)), self.attention_norm_eps
        drop = partial(dropout, p=self.p, training=self.training)

        def mlp(x: Tensor) -> Tensor:
            return self.contract(self.activation(drop(self.expand(x))))  # type: ignore[no-any-return]

        if self.pre_norm:
            x = drop(self.attention(norm(x, eps=eps), valid), rest=x)
            return drop(mlp(norm(x)), rest=x)
        x = norm(drop(self.attention(x, valid), rest=x), eps=eps)
        return norm(drop(mlp(x), rest=x))


class Encoder(nn.Module):
    """The classifier of the paper's experiments."""

    positions: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        symbols = config.vocabulary_size + config.extra_tokens
        # Filling a tensor without memory would load torch's compiler, which takes a second.
        unfilled = torch.empty(symbols, config.width) if torch.empty(()).is_meta else None
        self.embedding = nn.Embedding(symbols, config.width, _weight=unfilled)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.blocks))
        self.head = Affine(config.width, config.classes)
        longest = config.length + config.extra_tokens
        self.register_buffer("positions", sinusoids(longest, config.width), persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def attention(self, layer: int) -> Attention:
        """Return the attention of a block, counted from 0."""
        return self.blocks[layer].attention  # type: ignore[return-value]

    @classmethod
    def stacked(cls, encoders: Sequence["Encoder"]) -> Self:
        """Return an encoder of the samples of several, one after the other, with parameters (G, …)."""
        whole = copy.deepcopy(encoders[0])
        for name, parameter in whole.named_parameters():
            parameter.data = torch.stack([each.get_parameter(name).detach() for each in encoders])
        return whole  # type: ignore[return-value]

    @torch.no_grad()
    def scale_queries_and_keys(self, factor: float) -> None:
        """Multiply W_q, W_k and their biases, which multiplies scores and δ by the square of the factor."""
        for i in range(self.config.blocks):
            for parameter in self.attention(i).qkv.parameters():
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
        x, valid = self.embed(tokens), self.valid(tokens, padded)
        for block in self.blocks:
            x = block(x, valid)
        return self.classify(x, valid)

    def classify(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return logits (B, classes) from the last block's output (B, L + extra tokens, d) and :meth:`valid`."""
        if self.config.cls_tokens:
            pooled = x[:, 0]
        elif valid is None:
            pooled = x.mean(1)
        else:
            pooled = (x * valid[:, :, None]).sum(1) / valid.sum(1, keepdim=True)
        return self.head(pooled)  # type: ignore[no-any-return]

    def sequence(self, tokens: Tensor) -> Tensor:
        """Return the ids of all tokens that attention sees: CLS, the input, the global tokens."""
        c = self.config
        if not c.extra_tokens:
            return tokens
        added = torch.arange(c.extra_tokens, device=tokens.device).add(c.pad_id + 1).expand(len(tokens), -1)
        return torch.cat([added[:, c.global_tokens :], tokens, added[:, : c.global_tokens]], 1)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the scaled embedding plus sinusoidal positions: (B, L) -> (B, L + extra tokens, d)."""
        ids, table = self.sequence(tokens), self.embedding.weight
        if table.ndim == 3:  # the tables of several models, whose samples follow each other
            first = torch.arange(0, table.shape[:2].numel(), table.shape[1], device=ids.device)
            ids = (ids.view(len(table), -1) + first[:, None]).view_as(ids)
            table = table.flatten(0, 1)
        length, positions, c = tokens.shape[1], self.positions, self.config
        if c.global_tokens and length < c.length:  # global tokens keep the last positions
            positions = torch.cat([positions[: c.cls_tokens + length], positions[c.cls_tokens + c.length :]])
        x = F.embedding(ids, table) * math.sqrt(c.width) + positions[: length + c.extra_tokens]
        return dropout(x, c.dropout, self.training)

    def valid(self, tokens: Tensor, padded: bool | None = None) -> Tensor | None:
        """Return which tokens of :meth:`sequence` count."""
        c = self.config
        if c.pad_as_token or padded is False:
            return None
        valid = tokens != c.pad_id
        if padded is None and bool(valid.all()):
            return None
        return F.pad(valid, (c.cls_tokens, c.global_tokens), value=True) if c.extra_tokens else valid
