"""How a model was trained: a frozen record, stored in every checkpoint."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Self

from semdiag_models.errors import InputError, unknown_name
from semdiag_models.record import LARGEST_SIZE, Record

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
_LARGEST_DATA = 10**9  # tokens of a run's samples, 8 GB


@dataclass(frozen=True)
class TextSource(Record):
    """The text of a language-modelling run, and how it is cut into pieces."""

    file: str  # as the user named it
    sha256: str  # of the file
    tokenizer: str  # unigram or bpe
    vocabulary: int  # pieces
    model: str = field(repr=False)  # SentencePiece's own, in base64
    holdout_file: str | None = None  # None: the last tenth of the lines of the first file is held out
    holdout_sha256: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.vocabulary < LARGEST_SIZE:
            raise InputError(f"vocabulary must lie in 1 … {LARGEST_SIZE - 1}. Got {self.vocabulary}.")

    @property
    def label(self) -> str:
        """The file's name and six digits that tell texts, tokenizers and vocabularies apart."""
        known = f"{self.sha256} {self.holdout_sha256} {self.model}"
        name = re.sub(r"[^\w.-]+", "-", PurePath(self.file).stem)[:40]
        return f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class ListOpsTrees(Record):
    """Another law of trees than the paper's for the task listops, checked by the task."""

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
class TrainingConfig(Record):
    """Data and optimisation of one run."""

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

    optimizer: str = "sgd"  # a key of OPTIMIZERS
    weight_decay: float | None = None  # None: torch's default, 0.01 for adamw and 0 for the others
    until: float | None = None  # training accuracy in (0, 1] after which no further epoch is begun
    precision: str = "float32"  # of the training steps, a key of PRECISIONS; evaluation is in float32
    compiled: bool = False  # the steps go through torch.compile
    query_key_scale: float = 1.0  # factor on W_q, W_k and their biases at the initialisation
    fresh_samples: bool = False  # every epoch draws training samples of its own: the loss cannot fall by memory
    frozen: tuple[str, ...] = ()  # keys of FROZEN: parameters that stay as they were initialised
    least_length: int | None = None  # each sample's length is drawn from least_length … length; None: it is length

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
        """Refuse a source of samples that does not go with the task."""
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
        """Refuse what the steps of the optimiser cannot take."""
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
