"""The compact encoder: embedding, pre-norm blocks, mean pooling, linear head."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models.configuration import ModelConfig
from semdiag_models.dense_attention import dense_attention
from semdiag_models.dropout import add_dropout, dropout
from semdiag_models.selected_attention import selected_attention
from semdiag_models.selection import select_keys

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "mish": F.mish}


class AttentionCore(nn.Module):
    """Softmax attention over selected keys. The one hook point: its inputs are all that attention does.

    ``register_forward_hook`` on it sees (q, k, v, scale, valid, selected); scores are ``scale · q kᵀ``.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor | None
    ) -> Tensor:
        """Mix the values.

        Args:
            q: queries (B, H, L, D).
            k: keys (B, H, L, D).
            v: values (B, H, L, D).
            scale: factor on the scores.
            valid: (B, L) bool, false for PAD; None if there is none.
            selected: (B, H, L, K) key positions, -1 for none; None if all valid keys are selected.

        Returns:
            Mixed values (B, H, L, D).
        """
        p = self.p if self.training else 0.0
        if selected is None:
            return dense_attention(q, k, v, scale, valid, p)
        return selected_attention(q, k, v, scale, selected, p)


class Attention(nn.Module):
    """Multi-head attention with biases; every head is ``head_width`` wide."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        self.kind, self.k = config.attention, config.k
        self.scale = config.inverse_temperature / math.sqrt(config.head_width)
        inner = config.heads * config.head_width
        self.qkv = nn.Linear(config.width, 3 * inner)
        self.core = AttentionCore(config.dropout)
        self.out = nn.Linear(inner, config.width)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Attend: (B, L, d), (B, L) or None -> (B, L, d)."""
        qkv: Tensor = self.qkv(x)
        if qkv.dtype == x.dtype:
            mixed = self._mix(qkv, valid)
        else:  # under autocast; scores of 8 bits would be full of ties, so attention is as precise as its input
            with torch.autocast(x.device.type, enabled=False):
                mixed = self._mix(qkv.to(x.dtype), valid)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
        return attended

    def _mix(self, qkv: Tensor, valid: Tensor | None) -> Tensor:
        """Select keys and mix values: (B, L, 3·H·D) -> (B, H, L, D)."""
        split = qkv.view(*qkv.shape[:2], 3, self.heads, self.head_width)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (B, H, L, D)
        selected = select_keys(self.kind, self.k, q, k, self.scale, valid)
        mixed: Tensor = self.core(q, k, v, self.scale, valid, selected)
        return mixed


class Block(nn.Module):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x))); the norms have no parameters."""

    def __init__(self, config: ModelConfig, attention_norm_eps: float) -> None:
        super().__init__()
        self.width, self.p, self.attention_norm_eps = config.width, config.dropout, attention_norm_eps
        self.activation = _ACTIVATIONS[config.activation]
        self.attention = Attention(config)
        self.expand = nn.Linear(config.width, config.mlp_width)
        self.contract = nn.Linear(config.mlp_width, config.width)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Transform the residual stream: (B, L, d) -> (B, L, d)."""
        normed = F.layer_norm(x, (self.width,), eps=self.attention_norm_eps)
        x = add_dropout(x, self.attention(normed, valid), self.p, self.training)
        hidden = dropout(self.expand(F.layer_norm(x, (self.width,))), self.p, self.training)
        return add_dropout(x, self.contract(self.activation(hidden)), self.p, self.training)


class Encoder(nn.Module):
    """The classifier of the paper's experiments.

    Source: paper, section on experiments, as its released code runs. Deviation: the first norm has eps 1e-5
    like the others (``first_norm_eps``), dropout is off in evaluation, PAD is left out (``pad_as_token``).

    Args:
        config: the architecture.

    Example:
        >>> model = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=8, attention="topk", k=2)).eval()
        >>> model(torch.tensor([[0, 1, 1, 0]])).shape
        torch.Size([1, 2])
    """

    positions: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        eps = [config.first_norm_eps] + [1e-5] * (config.blocks - 1)
        self.blocks = nn.ModuleList(Block(config, e) for e in eps)
        self.head = nn.Linear(config.width, config.classes)
        self.register_buffer("positions", _sinusoids(config.length, config.width), persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, padded: bool | None = None) -> Tensor:
        """Classify.

        Args:
            tokens: (B, L) int64 token ids, L at most ``config.length``.
            padded: whether PAD may occur among them; None looks (on a GPU, looking waits for the device).

        Returns:
            Logits (B, classes).
        """
        valid = self.valid(tokens, padded)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, valid)
        logits: Tensor = self.head(_mean(x, valid))
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Scaled embedding plus sinusoidal positions: (B, L) -> (B, L, d)."""
        x = self.embedding(tokens) * math.sqrt(self.config.width) + self.positions[: tokens.shape[1]]
        return dropout(x, self.config.dropout, self.training)

    def valid(self, tokens: Tensor, padded: bool | None = None) -> Tensor | None:
        """(B, L) bool, false where a token is PAD and PAD does not count; None if there is no such token."""
        if self.config.pad_as_token or padded is False:
            return None
        valid = tokens != self.config.pad_id
        return None if padded is None and bool(valid.all()) else valid


def _mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid positions: (B, L, d) -> (B, d)."""
    if valid is None:
        return x.mean(1)
    return (x * valid[:, :, None]).sum(1) / valid.sum(1, keepdim=True)


def _sinusoids(length: int, width: int) -> Tensor:
    """(L, d) positions: sines on even channels, cosines on odd ones, base 10000."""
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).view(length, width)
