"""Records that every checkpoint stores: the architecture of a model, and the data and optimisation of a run."""

import hashlib
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePath
from typing import Any, Self

from semdiag_models.attention.selection import ATTENTIONS, DRAWN, LOCAL
from semdiag_models.reading import InputError, unknown_name

# largest size of any part of a model: a checkpoint's numbers are used before the model is built
LARGEST_SIZE = 100_000


class Record:
    """A frozen dataclass of plain values and other records."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the record from plain values."""
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
        """Refuse a plain value that does not fit a field."""
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
    return re.sub(r"semdiag_models\.\w+\.", "", name)  # the name of a record without its module


def _fits(value: object, annotation: str) -> bool:
    """Return whether a plain value fits a field with this annotation."""
    if "tuple" in annotation:
        kind = str if "str" in annotation else int
        return isinstance(value, list | tuple) and all(type(item) is kind for item in value)
    if isinstance(value, bool):
        return "bool" in annotation
    if isinstance(value, Record):
        return type(value).__name__ in annotation
    names = {"int": int, "float": (int, float), "str": str, "None": type(None)}
    return any(name in annotation and isinstance(value, kind) for name, kind in names.items())  # type: ignore[arg-type]


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
_OF_ONE_KIND: dict[str, tuple[str, float, float]] = {  # kind of attention, and allowed range
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

    vocabulary_size: int  # number of token ids of inputs, including PAD (the last one)
    classes: int
    length: int  # number of tokens of the longest input
    attention: str = "full"  # key of ATTENTIONS
    k: int | None = None  # number of kept keys per query; None for full attention
    blocks: int = 5
    width: int = 64  # width d of the residual stream
    mlp_width: int = 64
    heads: int = 1
    head_width: int = 64  # width of queries, keys and values; scores are divided by its square root
    activation: str = "relu"  # key of ACTIVATIONS
    dropout: float = 0.01  # probability of dropout, wherever the paper uses it
    inverse_temperature: float = 1.0  # factor on the scores
    first_norm_eps: float = 1e-5  # eps of the first attention norm; the paper's released code has 0 there
    pad_as_token: bool = False  # whether PAD is attended to and pooled, as in the paper's runs
    global_tokens: int = 0  # number of learned tokens after the input, which attend to all and to which all attend
    norm: str = "pre"  # key of NORMS
    pooling: str = "mean"  # key of POOLINGS
    cls_as_key: bool = True  # False as in the paper's code under masks: CLS sees all, but no other token sees CLS
    selection_seed: int = 0  # random seed for random keys, hash functions, first centroids
    hash_rounds: int = 1  # rounds of lsh; a query keeps the k keys of its bucket in every round
    hash_bits: int | None = None  # bits per hash of lsh; None means two to four buckets for every k tokens
    hashes: str = "shared"  # key of HASHES, for lsh
    clusters: int | None = None  # number of clusters of routing; None means one for every k tokens
    centroid_decay: float = 0.999  # weight of the old centroid in a training step of routing
    score_gradient: str = "exact"  # key of SCORE_GRADIENTS, for topk: how scores get gradients

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
FROZEN = {"qk": "query and key projections, W_q and W_k, with their biases"}
_LARGEST_DATA = 10**9  # largest number of tokens in a run's samples, 8 GB


@dataclass(frozen=True)
class TextSource(Record):
    """Text of a language-modelling run, with its tokenizer."""

    file: str  # path as the user gave it
    sha256: str  # hash of the file
    tokenizer: str  # unigram or bpe
    vocabulary: int  # number of pieces
    model: str = field(repr=False)  # SentencePiece's model in base64
    # path of the held-out text; None means the last tenth of the lines of the first file
    holdout_file: str | None = None
    holdout_sha256: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.vocabulary < LARGEST_SIZE:
            raise InputError(f"vocabulary must lie in 1 … {LARGEST_SIZE - 1}. Got {self.vocabulary}.")

    @property
    def label(self) -> str:
        """File name and six digits that distinguish texts, tokenizers and vocabularies."""
        known = f"{self.sha256} {self.holdout_sha256} {self.model}"
        name = re.sub(r"[^\w.-]+", "-", PurePath(self.file).stem)[:40]
        return f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class ListOpsTrees(Record):
    """Law of trees for the task listops other than the paper's, which the task checks."""

    shortest: int = 501  # smallest number of tokens of a sample
    longest: int = 599
    max_depth: int = 10  # largest depth, counted from 1 at the root
    min_arity: int = 2  # smallest number of arguments of an operator
    max_arity: int = 10

    @property
    def label(self) -> str:
        """Everything that distinguishes such laws, in one word."""
        label = f"{self.shortest}-{self.longest}-depth-{self.max_depth}"
        arities = (self.min_arity, self.max_arity)
        return label if arities == (2, 10) else f"{label}-arity-{self.min_arity}-{self.max_arity}"


@dataclass(frozen=True)
class TrainingConfig(Record):
    """Data and optimisation of one run."""

    task: str
    length: int  # number of tokens per sample
    epochs: int
    seed: int = 153476998  # random seed for data, initialisation, dropout and batch order; the paper's first seed
    train_samples: int = 5000
    holdout_samples: int = 2000
    batch_size: int = 25
    learning_rate: float = 0.1
    learning_rate_decay: float = 0.9995  # factor per epoch
    gradient_clip: float = 0.5  # largest 2-norm of the whole gradient
    snapshots: tuple[int, ...] = ()  # epochs kept as files of their own, besides 0, best and last
    text: TextSource | None = None  # text of the task text, and of no other task
    listops: ListOpsTrees | None = None  # trees of the task listops; None means the paper's

    optimizer: str = "sgd"  # key of OPTIMIZERS
    # weight decay; None means torch's default, 0.01 for adamw and 0 for the others
    weight_decay: float | None = None
    until: float | None = None  # training accuracy in (0, 1] after which no further epoch begins
    precision: str = "float32"  # key of PRECISIONS, for the training steps; evaluation is in float32
    compiled: bool = False  # whether the steps go through torch.compile
    query_key_scale: float = 1.0  # factor on W_q, W_k and their biases at the initialisation
    # whether every epoch draws training samples of its own, so that the loss cannot fall by memory
    fresh_samples: bool = False
    frozen: tuple[str, ...] = ()  # keys of FROZEN: parameters that stay at their initialisation
    # smallest length of a sample, drawn from least_length … length; None means that it is length
    least_length: int | None = None

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

    def __post_init__(self) -> None:
        self._check_task()
        object.__setattr__(self, "snapshots", tuple(self.snapshots))
        object.__setattr__(self, "frozen", tuple(self.frozen))
        self._check_names()
        self._check_sizes()
        self._check_steps()

    def _check_task(self) -> None:
        """Refuse a source of samples that does not belong to the task."""
        if (self.task == "text") != (self.text is not None):
            raise InputError(
                f"The task text and nothing else has a text. Got task={self.task!r}, text={self.text}."
            )
        if self.listops is not None and self.task != "listops":
            raise InputError(f"Only the task listops has trees. Got task={self.task!r}, {self.listops}.")
        if self.fresh_samples and self.text is not None:
            raise InputError("A text has no fresh samples: leave out --fresh-samples.")
        if self.least_length is not None:
            if self.task in ("text", "listops"):
                raise InputError(f"The task {self.task} draws no lengths: give it one length.")
            if not 1 <= self.least_length < self.length:
                raise InputError(f"A range of lengths rises, like 5:20. Got {self.least_length}:{self.length}.")

    def _check_names(self) -> None:
        """Refuse unknown names of parameters, optimisers and precisions."""
        for part in self.frozen:
            if part not in FROZEN:
                raise unknown_name("frozen", part, FROZEN)
        if len(set(self.frozen)) < len(self.frozen):
            raise InputError(f"frozen names every part once. Got {', '.join(self.frozen)}.")
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)

    def _check_sizes(self) -> None:
        """Refuse rates, ends and sizes that are out of range."""
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay must be finite and not negative. Got {self.weight_decay}.")
        if self.until is not None and not 0 < self.until <= 1:
            raise InputError(f"until is a training accuracy in (0, 1], like 0.999. Got until={self.until}.")
        for name in ("length", "epochs", "train_samples", "holdout_samples", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1. Got {name}={getattr(self, name)}.")
            if name in ("epochs", "batch_size") and getattr(self, name) > _LARGEST_DATA:
                raise InputError(f"{name} must be at most {_LARGEST_DATA}. Got {name}={getattr(self, name)}.")
        data = (self.train_samples + self.holdout_samples) * self.length
        if data > _LARGEST_DATA:
            raise InputError(f"The samples must be at most {_LARGEST_DATA} tokens in all. Got {data}.")

    def _check_steps(self) -> None:
        """Refuse settings that the steps of the optimiser cannot use."""
        for name in ("learning_rate", "learning_rate_decay", "gradient_clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive. Got {name}={getattr(self, name)}.")
            if name != "gradient_clip" and getattr(self, name) == math.inf:
                raise InputError(f"{name} must be finite. Got {name}={getattr(self, name)}.")
        if not 0 < self.query_key_scale < math.inf:
            raise InputError(f"query_key_scale must be positive and finite. Got {self.query_key_scale}.")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must lie in 0 … 2^63 - 1. Got seed={self.seed}.")
        wrong = [e for e in self.snapshots if not 0 <= e <= self.epochs]
        if wrong:
            raise InputError(f"Snapshots must lie in 0 … {self.epochs} (epochs). Got {wrong[0]}.")
