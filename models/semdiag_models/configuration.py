"""What a model is and how it was trained: two frozen records, stored in every checkpoint."""

import hashlib
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePath
from typing import Any, Self

from semdiag_models.errors import InputError, unknown_name

ATTENTIONS = {
    "full": "every query attends to every key",
    "banded": "k neighbouring keys around the query, shifted inward at the ends (input-agnostic)",
    "block": "the k keys of the query's own block (input-agnostic)",
    "topk": "the k keys with the largest scores (input-dependent: the heavy hitters)",
    "bottomk": "the k keys with the smallest scores (input-dependent: a control)",
    "random": "k keys drawn once for each block, head and query (input-agnostic: a control)",
}
LOCAL = ("banded", "block")  # the kinds that take global tokens
ACTIVATIONS = ("relu", "gelu", "mish")
NORMS = {
    "pre": "x + attention(norm(x)), then x + mlp(norm(x)): the paper's code",
    "post": "norm(x + attention(x)), then norm(x + mlp(x)): the paper's equations",
}
POOLINGS = {
    "mean": "the mean over all tokens that are not PAD",
    "cls": "the output of a learnt token in front of the input",
}
OPTIMIZERS = {
    "sgd": "plain, without momentum, as the paper ran it",
    "adam": "betas 0.9 and 0.999",
    "adamw": "Adam with decoupled weight decay",
}
PRECISIONS = {
    "float32": "everything in 32 bits",
    "tf32": "matrix products rounded to 19 bits; CUDA only",
    "bf16": "linear layers in 16 bits; parameters, attention, norms, loss and optimiser in float32",
}
_LARGEST_SIZE = 100_000  # of anything in a model: what a checkpoint says is believed before it is built
_LARGEST_DATA = 10**9  # tokens of a run's samples, 8 GB
_LEAST_DROPOUT = 1e-9  # gaps between drops are counted in 64 bits


class _Record:
    """Reading a record back from a checkpoint, where nothing can be trusted."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the record from plain values.

        Args:
            values: one entry per field; fields with a default may be missing.

        Returns:
            The validated record.

        Raises:
            InputError: if a key is unknown, a field is missing or has the wrong type, or a value is illegal.
        """
        declared = [f.name for f in fields(cls)]  # type: ignore[arg-type]  # subclasses are dataclasses
        for key, value in values.items():
            if key not in declared:
                raise unknown_name(f"{cls.__name__} field", str(key), declared)
            cls.check_type(key, value)
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"{cls.__name__} is incomplete: {error}.") from None

    @classmethod
    def check_type(cls, key: str, value: object) -> None:
        """Refuse a plain value that cannot stand in a field.

        Args:
            key: a field of the record.
            value: for it.

        Raises:
            InputError: if the value has the wrong type.
        """
        declared = next(f.type for f in fields(cls) if f.name == key)  # type: ignore[arg-type]  # as above
        if not _fits(value, wanted := _type_name(declared)):
            shown = " ".join(reprlib.repr(value).split())
            raise InputError(f"{cls.__name__}.{key} must be {wanted}. Got {shown}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, tuples as lists."""
        values = asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def _type_name(annotation: object) -> str:
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return name.removeprefix(f"{__name__}.")


def _fits(value: object, annotation: str) -> bool:
    """Whether a plain value may stand in a field annotated like this."""
    if "tuple" in annotation:
        return isinstance(value, list | tuple) and all(type(item) is int for item in value)
    if isinstance(value, bool):
        return "bool" in annotation
    names = {"int": int, "float": (int, float), "str": str, "None": type(None)}
    names |= {"TextSource": TextSource, "ListOpsTrees": ListOpsTrees}
    return any(name in annotation and isinstance(value, kind) for name, kind in names.items())  # type: ignore[arg-type]


@dataclass(frozen=True)
class ModelConfig(_Record):
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
            if getattr(self, name) > _LARGEST_SIZE:
                raise InputError(f"{name} must be at most {_LARGEST_SIZE}. Got {name}={getattr(self, name)}.")
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
        if self.attention == "full":
            if self.k is not None:
                raise InputError(f"Full attention keeps every key and takes no k. Got k={self.k}.")
        elif self.k is None:
            raise InputError(f"{self.attention} attention needs k, the number of keys kept per query.")
        elif self.k < 1:
            raise InputError(f"k must be at least 1. Got k={self.k}.")
        elif self.k > self.length:
            raise InputError(f"k must be at most the sequence length. Got k={self.k}, length={self.length}.")

    def _check_extras(self) -> None:
        if not 0 <= self.global_tokens <= _LARGEST_SIZE:
            raise InputError(f"global_tokens must lie in 0 … {_LARGEST_SIZE}. Got {self.global_tokens}.")
        if self.global_tokens and self.attention not in LOCAL:
            raise InputError(
                f"Global tokens go with {' and '.join(LOCAL)} attention only. Got {self.global_tokens} with "
                f"{self.attention} attention."
            )
        if not 0 <= self.selection_seed < 2**63:
            raise InputError(f"selection_seed must lie in 0 … 2^63 - 1. Got {self.selection_seed}.")
        if self.selection_seed and self.attention != "random":
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


@dataclass(frozen=True)
class TextSource(_Record):
    """The text of a language-modelling run, and how it is cut into pieces.

    Raises:
        InputError: if a value is illegal.
    """

    file: str  # as the user named it
    sha256: str  # of the file
    tokenizer: str  # unigram or bpe
    vocabulary: int  # pieces
    model: str = field(repr=False)  # SentencePiece's own, in base64
    holdout_file: str | None = None  # None: the last tenth of the lines of the first file is held out
    holdout_sha256: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.vocabulary < _LARGEST_SIZE:
            raise InputError(f"vocabulary must lie in 1 … {_LARGEST_SIZE - 1}. Got {self.vocabulary}.")

    @property
    def label(self) -> str:
        """The file's name and six digits that tell texts, tokenizers and vocabularies apart."""
        known = f"{self.sha256} {self.holdout_sha256} {self.model}"
        name = re.sub(r"[^\w.-]+", "-", PurePath(self.file).stem)[:40]
        return f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class ListOpsTrees(_Record):
    """Another law of trees than the paper's for the task listops, checked by the task.

    Example:
        >>> ListOpsTrees(shortest=50, longest=100, max_depth=5).label
        '50-100-depth-5'
    """

    shortest: int = 501  # tokens of a sample
    longest: int = 599
    max_depth: int = 10  # counted from 1 at the root
    min_arity: int = 2  # arguments of an operator
    max_arity: int = 10

    @property
    def label(self) -> str:
        """All that tells such laws apart, in one word."""
        label = f"{self.shortest}-{self.longest}-depth-{self.max_depth}"
        arities = (self.min_arity, self.max_arity)
        return label if arities == (2, 10) else f"{label}-arity-{self.min_arity}-{self.max_arity}"


@dataclass(frozen=True)
class TrainingConfig(_Record):
    """Data and optimisation of one run.

    Raises:
        InputError: if a value is illegal; the message says what would work.
    """

    task: str
    length: int  # tokens per sample
    epochs: int
    seed: int = 153476998  # of data, initialisation, dropout and batch order; the paper's first seed
    train_samples: int = 5000
    holdout_samples: int = 2000
    batch_size: int = 25
    learning_rate: float = 0.1
    learning_rate_decay: float = 0.9995  # factor per epoch
    gradient_clip: float = 0.5  # largest 2-norm of the whole gradient
    snapshots: tuple[int, ...] = ()  # epochs kept as files of their own, besides 0, best and last
    text: TextSource | None = None  # of the task text, and of no other
    listops: ListOpsTrees | None = None  # of the task listops; None: the paper's

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the record from plain values, with those of its text or trees in a dictionary of their own."""
        text, listops = values.get("text"), values.get("listops")
        if isinstance(text, Mapping):
            values = {**values, "text": TextSource.from_dict(text)}
        if isinstance(listops, Mapping):
            values = {**values, "listops": ListOpsTrees.from_dict(listops)}
        return super().from_dict(values)

    @property
    def task_label(self) -> str:
        """What is learned, in one word: ``even-pairs``, ``listops-50-100-depth-5``, ``text-war-1f03ac``."""
        variant = self.text or self.listops
        return self.task if variant is None else f"{self.task}-{variant.label}"

    optimizer: str = "sgd"  # a key of OPTIMIZERS
    weight_decay: float | None = None  # None: torch's default, 0.01 for adamw and 0 for the others
    until: float | None = None  # training accuracy in (0, 1] after which no further epoch is begun
    precision: str = "float32"  # of the training steps, a key of PRECISIONS; evaluation is in float32
    compiled: bool = False  # the steps go through torch.compile

    def __post_init__(self) -> None:
        if (self.task == "text") != (self.text is not None):
            raise InputError(
                f"The task text and nothing else has a text. Got task={self.task!r}, text={self.text}."
            )
        if self.listops is not None and self.task != "listops":
            raise InputError(f"Only the task listops has trees. Got task={self.task!r}, {self.listops}.")
        object.__setattr__(self, "snapshots", tuple(self.snapshots))
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay must be finite and not negative. Got {self.weight_decay}.")
        if self.until is not None and not 0 < self.until <= 1:
            raise InputError(f"until is a training accuracy in (0, 1], like 0.999. Got until={self.until}.")
        for name in ("length", "epochs", "train_samples", "holdout_samples", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1. Got {name}={getattr(self, name)}.")
        data = (self.train_samples + self.holdout_samples) * self.length
        if data > _LARGEST_DATA:
            raise InputError(f"The samples must be at most {_LARGEST_DATA} tokens in all. Got {data}.")
        for name in ("learning_rate", "learning_rate_decay", "gradient_clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive. Got {name}={getattr(self, name)}.")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must lie in 0 … 2^63 - 1. Got seed={self.seed}.")
        wrong = [e for e in self.snapshots if not 0 <= e <= self.epochs]
        if wrong:
            raise InputError(f"Snapshots must lie in 0 … {self.epochs} (epochs). Got {wrong[0]}.")
