"""What a model is: a frozen record, stored in every checkpoint."""

import math
from dataclasses import dataclass

from semdiag_models.attention_kinds import ATTENTIONS, DRAWN, LOCAL
from semdiag_models.errors import InputError, unknown_name
from semdiag_models.record import LARGEST_SIZE, Record

ACTIVATIONS = ("relu", "gelu", "mish")
NORMS = {
    "pre": "x + attention(norm(x)), then x + mlp(norm(x)): the paper's code",
    "post": "norm(x + attention(x)), then norm(x + mlp(x)): the paper's equations",
}
POOLINGS = {
    "mean": "the mean over all tokens that are not PAD",
    "cls": "the output of a learnt token in front of the input",
}
_LEAST_DROPOUT = 1e-9  # gaps between drops are counted in 64 bits


@dataclass(frozen=True)
class ModelConfig(Record):
    """Architecture of the encoder.

    Raises:
        InputError: if a value is illegal; the message says what would work.

    Example:
        >>> ModelConfig(vocabulary_size=3, classes=2, length=40, attention="topk", k=5).k
        5
    """

    vocabulary_size: int  # token ids of inputs, PAD (the last one) included
    classes: int
    length: int  # tokens of the longest input
    attention: str = "full"  # a key of ATTENTIONS
    k: int | None = None  # keys kept per query; None for full attention
    blocks: int = 5
    width: int = 64  # d, of the residual stream
    mlp_width: int = 64
    heads: int = 1
    head_width: int = 64  # of queries, keys and values; scores are divided by its square root
    activation: str = "relu"  # one of ACTIVATIONS
    dropout: float = 0.01  # probability, at every place where the paper drops
    inverse_temperature: float = 1.0  # factor on the scores
    first_norm_eps: float = 1e-5  # of the first attention norm; the paper's released code has 0 there
    pad_as_token: bool = False  # PAD is attended to and pooled, as in the paper's runs
    global_tokens: int = 0  # g learnt tokens behind the input: they attend to all and all attend to them
    norm: str = "pre"  # a key of NORMS
    pooling: str = "mean"  # a key of POOLINGS
    selection_seed: int = 0  # of the keys that random attention keeps

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise unknown_name("attention", self.attention, ATTENTIONS)
        for name, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("pooling", POOLINGS)):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        sizes = (
            "vocabulary_size",
            "classes",
            "length",
            "blocks",
            "width",
            "mlp_width",
            "heads",
            "head_width",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1. Got {name}={getattr(self, name)}.")
            if getattr(self, name) > LARGEST_SIZE:
                raise InputError(f"{name} must be at most {LARGEST_SIZE}. Got {name}={getattr(self, name)}.")
        if self.width % 2:
            raise InputError(f"width must be even (sine and cosine positions). Got width={self.width}.")
        if self.dropout != 0 and not _LEAST_DROPOUT <= self.dropout < 1:
            least = f"{_LEAST_DROPOUT:g}"
            raise InputError(f"dropout must be 0 or lie in [{least}, 1). Got dropout={self.dropout}.")
        if not -math.inf < self.inverse_temperature < math.inf:
            raise InputError(f"inverse_temperature must be finite. Got {self.inverse_temperature}.")
        if not 0 <= self.first_norm_eps < math.inf:
            raise InputError(f"first_norm_eps must be finite and not negative. Got {self.first_norm_eps}.")
        self._check_k()
        self._check_extras()

    def _check_k(self) -> None:
        if ATTENTIONS[self.attention].dense:
            if self.k is not None:
                raise InputError(f"Full attention keeps every key and takes no k. Got k={self.k}.")
        elif self.k is None:
            raise InputError(f"{self.attention} attention needs k, the number of keys kept per query.")
        elif self.k < 1:
            raise InputError(f"k must be at least 1. Got k={self.k}.")
        elif self.k > self.length:
            raise InputError(f"k must be at most the sequence length. Got k={self.k}, length={self.length}.")

    def _check_extras(self) -> None:
        if not 0 <= self.global_tokens <= LARGEST_SIZE:
            raise InputError(f"global_tokens must lie in 0 … {LARGEST_SIZE}. Got {self.global_tokens}.")
        if self.global_tokens and self.attention not in LOCAL:
            raise InputError(
                f"Global tokens go with {' and '.join(LOCAL)} attention only. Got {self.global_tokens} with "
                f"{self.attention} attention."
            )
        if not 0 <= self.selection_seed < 2**63:
            raise InputError(f"selection_seed must lie in 0 … 2^63 - 1. Got {self.selection_seed}.")
        if self.selection_seed and self.attention not in DRAWN:
            raise InputError(f"Only random attention takes a selection_seed. Got one with {self.attention}.")

    @property
    def pad_id(self) -> int:
        """Token id of PAD; the global tokens have the ids after it, CLS the one after those."""
        return self.vocabulary_size - 1

    @property
    def cls_tokens(self) -> int:
        """Learnt tokens in front of the input: 1 with CLS pooling, else 0."""
        return int(self.pooling == "cls")

    @property
    def extra_tokens(self) -> int:
        """Tokens that the encoder adds to every input: CLS and the global ones."""
        return self.cls_tokens + self.global_tokens

    @property
    def keys_kept(self) -> int | None:
        """Keys that an ordinary query keeps: k, and in local attention CLS and the global tokens.

        Example:
            >>> ModelConfig(3, 2, 40, "banded", k=5, global_tokens=1).keys_kept
            6
        """
        return None if self.k is None else self.k + self.extra_tokens * (self.attention in LOCAL)

    @property
    def attention_label(self) -> str:
        """Attention, k and global tokens in one word: ``full``, ``topk-5``, ``banded-5-global-1``."""
        label = self.attention if self.k is None else f"{self.attention}-{self.k}"
        return f"{label}-global-{self.global_tokens}" if self.global_tokens else label
