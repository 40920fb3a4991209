"""The architecture of a model: a frozen record, stored in every checkpoint."""

import math
from dataclasses import dataclass

from semdiag_models.attention.kinds import ATTENTIONS, DRAWN, LOCAL
from semdiag_models.errors import InputError, unknown_name
from semdiag_models.record import LARGEST_SIZE, Record

ACTIVATIONS = ("relu", "gelu", "mish")
HASHES = {
    "shared": "sign hashes of queries and keys as they are: buckets of small angles",
    "asymmetric": "keys get one more entry that makes all as long as the longest: buckets of large scores",
}
NORMS = {
    "pre": "x + attention(norm(x)), then x + mlp(norm(x)): the paper's code",
    "post": "norm(x + attention(x)), then norm(x + mlp(x)): the paper's equations",
}
SCORE_GRADIENTS = {
    "exact": "the derivative of the forward pass: scores of keys that are left out have none",
    "straight-through": "of topk, in training: forward the k largest, backward the softmax over all keys",
}
POOLINGS = {
    "mean": "the mean over all tokens that are not PAD",
    "cls": "the output of a learnt token in front of the input",
}
_OF_ONE_KIND: dict[str, tuple[str, float, float]] = {  # the kind of attention, and the allowed range
    "hash_rounds": ("lsh", 1, 100),
    "hash_bits": ("lsh", 1, 30),
    "hashes": ("lsh", 0, 0),
    "clusters": ("routing", 1, LARGEST_SIZE),
    "centroid_decay": ("routing", 0, 1),
}
_IN_THE_LABEL = {
    "global_tokens": "global-",
    "hash_rounds": "rounds-",
    "hash_bits": "bits-",
    "hashes": "",
    "clusters": "clusters-",
    "centroid_decay": "decay-",
    "score_gradient": "",
    "cls_as_key": "cls-no-key",
}
_LEAST_DROPOUT = 1e-9  # gaps between drops must fit 64 bits


@dataclass(frozen=True)
class ModelConfig(Record):
    """Architecture of the encoder."""

    vocabulary_size: int  # token ids of inputs, including PAD (the last one)
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
    dropout: float = 0.01  # probability, wherever the paper uses dropout
    inverse_temperature: float = 1.0  # factor on the scores
    first_norm_eps: float = 1e-5  # of the first attention norm; the paper's released code has 0 there
    pad_as_token: bool = False  # PAD is attended to and pooled, as in the paper's runs
    global_tokens: int = 0  # g learned tokens after the input, which attend to all and to which all attend
    norm: str = "pre"  # a key of NORMS
    pooling: str = "mean"  # a key of POOLINGS
    cls_as_key: bool = True  # False as in the paper's code under masks: CLS sees all, but no other token sees CLS
    selection_seed: int = 0  # of random keys, hash functions, first centroids
    hash_rounds: int = 1  # for lsh: a query keeps the k keys of its bucket in every round
    hash_bits: int | None = None  # for lsh, bits per hash; None means two to four buckets for every k tokens
    hashes: str = "shared"  # of lsh, a key of HASHES
    clusters: int | None = None  # for routing; None means one for every k tokens
    centroid_decay: float = 0.999  # for routing: weight of the old centroid in a training step
    score_gradient: str = "exact"  # for topk, a key of SCORE_GRADIENTS: how scores get gradients

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise unknown_name("attention", self.attention, ATTENTIONS)
        named = (
            *(("activation", ACTIVATIONS), ("norm", NORMS), ("pooling", POOLINGS), ("hashes", HASHES)),
            ("score_gradient", SCORE_GRADIENTS),
        )
        for name, known in named:
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
        self._check_matching()

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
        if self.score_gradient != "exact" and self.attention != "topk":
            raise InputError(
                f"Only topk attention takes score_gradient={self.score_gradient!r}. Got it with {self.attention}."
            )
        apart = ATTENTIONS[self.attention].follows_scores or self.attention in LOCAL
        if not self.cls_as_key and (self.pooling != "cls" or not apart or self.global_tokens):
            raise InputError("cls_as_key=False goes with CLS, local, topk or bottomk attention, no global tokens.")
        if not 0 <= self.selection_seed < 2**63:
            raise InputError(f"selection_seed must lie in 0 … 2^63 - 1. Got {self.selection_seed}.")
        if self.selection_seed and self.attention not in DRAWN:
            raise InputError(
                f"Only {', '.join(DRAWN[:-1])} and {DRAWN[-1]} attention take a selection_seed. Got one with "
                f"{self.attention}."
            )

    def _check_matching(self) -> None:
        """Check options of hashes and clusters, and fill in the numbers that the user left open."""
        for name, (kind, _, _) in _OF_ONE_KIND.items():
            if self.attention != kind and getattr(self, name) != getattr(type(self), name):
                raise InputError(f"Only {kind} attention takes {name}. Got it with {self.attention}.")
        for name, value in self._usual_numbers().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, (_, least, most) in _OF_ONE_KIND.items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not least <= value <= most:
                raise InputError(f"{name} must lie in {least} … {most}. Got {value}.")

    def _usual_numbers(self) -> dict[str, int]:
        """Return the default number of hash bits or clusters, by the windows of k in the longest input."""
        windows = -(-self.length // (self.k or 1))
        usual = {"lsh": {"hash_bits": 1 + (windows - 1).bit_length()}, "routing": {"clusters": windows}}
        return usual.get(self.attention, {})

    @property
    def pad_id(self) -> int:
        """Token id of PAD; the global tokens have the ids after it, CLS the one after those."""
        return self.vocabulary_size - 1

    @property
    def cls_tokens(self) -> int:
        """Number of learned tokens before the input: 1 with CLS pooling, else 0."""
        return int(self.pooling == "cls")

    @property
    def extra_tokens(self) -> int:
        """Number of tokens that the encoder adds to every input: CLS and the global ones."""
        return self.cls_tokens + self.global_tokens

    @property
    def everywhere(self) -> tuple[int, int]:
        """Number of tokens at the start, and at the end, that attend to all valid keys under the mask."""
        local = self.attention in LOCAL
        return (self.cls_tokens if local or not self.cls_as_key else 0, self.global_tokens if local else 0)

    @property
    def keys_kept(self) -> int | None:
        """Number of keys that an ordinary query keeps: k, plus CLS and the global tokens in local attention."""
        of_all = self.global_tokens + self.cls_tokens * self.cls_as_key if self.attention in LOCAL else 0
        return None if self.k is None else self.k + of_all

    @property
    def attention_label(self) -> str:
        """Attention, k and all else that distinguishes masks, in one word: ``topk-5``, ``banded-5-global-1``."""
        usual = {name: getattr(type(self), name) for name in _IN_THE_LABEL} | self._usual_numbers()
        words = [self.attention, *([] if self.k is None else [str(self.k)])]
        for name, word in _IN_THE_LABEL.items():
            value = getattr(self, name)
            if value != usual[name]:
                value = "" if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
                words.append(f"{word}{value}")
        return "-".join(words)
