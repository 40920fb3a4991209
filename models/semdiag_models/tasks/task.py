"""What a task is to the trainer, and the contract of formal-language tasks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from semdiag_models.reading import InputError

Samples = tuple[Tensor, Tensor]  # tokens (n, length) int64 and labels (n,) int64


@dataclass(frozen=True)
class Recipe:
    """The paper's training of a task: the defaults of ``semdiag train``."""

    length: int  # tokens per sample, before padding
    epochs: int
    blocks: int = 5
    learning_rate: float = 0.1
    learning_rate_decay: float = 0.9995  # factor per epoch
    width: int = 64
    mlp_width: int = 64
    head_width: int = 64
    batch_size: int = 25
    train_samples: int = 5000
    holdout_samples: int = 2000


class Classification(Protocol):
    """What the trainer needs to know of something to learn: a :class:`Task`, or a text."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def classes(self) -> int:
        """Number of labels."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, PAD included."""

    @property
    def recipe(self) -> Recipe:
        """Training defaults."""

    def draw(self, train: int, holdout: int, length: int, generator: torch.Generator) -> tuple[Samples, Samples]:
        """Draw training samples, then held-out ones."""


class Task(ABC):
    """A single-label sequence-classification task over a small vocabulary."""

    name: ClassVar[str]  # name on the command line and in JSON
    # names of the task in the benchmark's source and in the paper's released code
    aliases: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]  # one line for ``semdiag list tasks``
    symbols: ClassVar[tuple[str, ...]]  # printable form of each token id
    classes: ClassVar[int]  # number of labels
    majority: ClassVar[float]  # accuracy of the commonest label as the only answer, at the recipe's length
    # accuracy of the best rule that ignores almost all of the input, and that rule
    shortcut: ClassVar[tuple[float, str]]
    recipe: ClassVar[Recipe]  # training defaults

    @property
    def pad_id(self) -> int:
        """Token id of PAD, one past the last symbol."""
        return len(self.symbols)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, PAD included."""
        return len(self.symbols) + 1

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess."""
        return 1 / self.classes

    def draw(self, train: int, holdout: int, length: int, generator: torch.Generator) -> tuple[Samples, Samples]:
        """Draw training and held-out samples from one law; see :meth:`Classification.draw`."""
        return self.sample(train, length, generator), self.sample(holdout, length, generator)

    @abstractmethod
    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw n labelled strings."""

    def parse(self, text: str) -> list[int]:
        """Return the token ids of a string written with the task's symbols."""
        ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        words = text.split()
        parts = words if max(map(len, self.symbols)) > 1 else list("".join(words))
        unknown = [part for part in parts if part not in ids]
        if unknown:
            raise InputError(
                f"{unknown[0]!r} is not a symbol of {self.name}. Its symbols are: {' '.join(self.symbols)}."
            )
        return [ids[part] for part in parts]

    def require_length(self, length: int, least: int) -> None:
        """Refuse lengths for which the task has no string."""
        if length < least:
            raise InputError(f"{self.name} needs a length of at least {least}. Got length={length}.")
