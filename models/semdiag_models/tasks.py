"""The tasks in one table, how their strings are drawn, and the samples and the configuration of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor

from semdiag_files import InputError, unknown_name
from semdiag_models.config import ListOpsTrees, ModelConfig, Recipe, TrainingConfig
from semdiag_models.kinds import DRAWN
from semdiag_models.listops import SYMBOLS, Integers, Samples, list_operations, numpy_generator
from semdiag_models.text import Text

ADAM_RATE = 0.001  # learning rate of Adam; the recipes' rates are for plain SGD
POP = 2
PUSH_0 = 3
PUSH_1 = 4
EMPTY = 2  # label of an empty stack
MODULUS = 5
EQUATION = "01234+-()x="
BRACKETS = "01234+-*()x"  # symbols of the two tasks, in the order of their ids
_LONGEST_LEAF = 4  # d, -d, (d) and (-d) have one to four characters


def parity(n: int, length: int, generator: Generator) -> Samples:
    """Draw fair bits; the label is the number of ones modulo 2."""
    tokens = torch.randint(2, (n, length), generator=generator)
    return tokens, tokens.sum(1) % 2


def even_pairs(n: int, length: int, generator: Generator) -> Samples:
    """Draw fair bits; the label is the number of unequal neighbours modulo 2: whether first and last differ."""
    tokens = torch.randint(2, (n, length), generator=generator)
    return tokens, tokens[:, 0] ^ tokens[:, -1]


def cycle_navigation(n: int, length: int, generator: Generator) -> Samples:
    """Draw uniform steps of -1, 0 and 1 (tokens 0, 1, 2); the label is the place on a cycle of five."""
    tokens = torch.randint(3, (n, length), generator=generator)
    return tokens, (tokens.sum(1) - length) % 5


def missing_duplicate(n: int, length: int, generator: Generator) -> Samples:
    """Draw fair bits, double them, hide one (token 2); the label is the hidden bit. PAD fills an odd length."""
    half = length // 2
    bits = torch.randint(2, (n, half), generator=generator)
    hidden = torch.randint(2 * half, (n, 1), generator=generator)
    tokens = torch.full((n, length), 3)
    tokens[:, : 2 * half] = bits.repeat(1, 2).scatter(1, hidden, 2)
    return tokens, bits.gather(1, hidden % half).squeeze(1)


def stack_manipulation(n: int, length: int, generator: Generator) -> Samples:
    """Draw a stack, bottom first, and actions on it; the label is what then lies on top."""
    tokens = torch.randint(2, (n, length), generator=generator)
    if length > 1:
        bits = torch.randint(1, length, (n, 1), generator=generator)
        actions = torch.randint(POP, PUSH_1 + 1, (n, length), generator=generator)
        tokens = torch.where(torch.arange(length) < bits, tokens, actions)
    from_right = tokens.flip(1)
    unmatched = torch.where(from_right == POP, -1, 1).cumsum(1) == 1
    top = from_right.gather(1, unmatched.int().argmax(1, keepdim=True)).squeeze(1)
    top = torch.where(top >= PUSH_0, top - PUSH_0, top)
    return tokens, torch.where(unmatched.any(1), top, EMPTY)


def modular_arithmetic(n: int, length: int, generator: Generator) -> Samples:
    """Draw bracketed expressions; the label is the value modulo 5."""
    tokens, values = draw_expressions(n, length, BRACKETS, "+-*", numpy_generator(generator))
    return torch.from_numpy(tokens), torch.from_numpy(values)


def solve_equation(n: int, length: int, generator: Generator) -> Samples:
    """Draw expressions without products and replace one digit each by x, which is the label."""
    rng = numpy_generator(generator)
    size = length - 2
    rows = np.arange(n)
    expressions, values = draw_expressions(n, size, EQUATION, "+-", rng)
    at = rng.integers(size, size=n)  # x stands for the first digit here or after it, cyclically
    twice = np.where(np.tile(expressions, 2) < MODULUS, np.arange(2 * size), 2 * size)
    unknown = np.minimum.accumulate(twice[:, ::-1], axis=1)[:, ::-1][rows, at] % size
    labels = expressions[rows, unknown]
    expressions[rows, unknown] = EQUATION.index("x")
    equals = np.full(n, EQUATION.index("="))
    tokens = np.concatenate([expressions, equals[:, None], values[:, None]], 1)
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def draw_expressions(
    n: int, length: int, symbols: str, operators: str, rng: np.random.Generator
) -> tuple[Integers, Integers]:
    """Draw expressions of an exact length, with their values modulo 5."""
    tokens = np.empty((n, length), dtype=np.int64)
    choices = np.array([symbols.index(operator) for operator in operators])
    row = np.arange(n)
    start = np.zeros(n, dtype=np.int64)
    size = np.full(n, length)
    levels: list[tuple[Integers, NDArray[np.bool_], Integers]] = []
    while row.size:
        value = np.zeros(row.size, dtype=np.int64)
        leaf = size <= _LONGEST_LEAF
        value[leaf] = _write_leaves(tokens, row[leaf], start[leaf], size[leaf], symbols, rng)
        row = row[~leaf]
        start = start[~leaf]
        size = size[~leaf]
        left = rng.integers(1, size - 3)
        operator = rng.choice(choices, row.size)
        tokens[row, start] = symbols.index("(")
        tokens[row, start + 1 + left] = operator
        tokens[row, start + size - 1] = symbols.index(")")
        levels.append((value, leaf, operator))
        start = np.stack([start + 1, start + 2 + left], 1).ravel()
        size = np.stack([left, size - 3 - left], 1).ravel()
        row = row.repeat(2)
    below = np.zeros(0, dtype=np.int64)
    for value, leaf, operator in reversed(levels):
        left = below[0::2]
        right = below[1::2]
        plus = operator == symbols.index("+")
        minus = operator == symbols.index("-")
        value[~leaf] = np.where(plus, left + right, np.where(minus, left - right, left * right)) % MODULUS
        below = value
    return tokens, below


def _write_leaves(
    tokens: Integers, row: Integers, start: Integers, size: Integers, symbols: str, rng: np.random.Generator
) -> Integers:
    """Write d, -d, (d) or (-d), by size, into the tokens; return their values."""
    digit = rng.integers(MODULUS, size=row.size)
    negative = size % 2 == 0
    bracketed = size >= 3
    tokens[row[bracketed], start[bracketed]] = symbols.index("(")
    tokens[row[bracketed], (start + size - 1)[bracketed]] = symbols.index(")")
    tokens[row[negative], (start + bracketed)[negative]] = symbols.index("-")
    tokens[row, start + bracketed + negative] = digit
    return np.where(negative, -digit, digit) % MODULUS


@dataclass(frozen=True, eq=False)
class Task:
    """A single-label sequence-classification task over a small vocabulary."""

    name: str  # name on the command line and in JSON
    aliases: tuple[str, ...]  # names in the benchmark's source and in the paper's released code
    summary: str  # one line for ``semdiag list tasks``
    symbols: tuple[str, ...]  # printable form of each token id
    classes: int  # number of labels
    majority: float  # accuracy of the commonest label as the only answer, at the recipe's length
    shortcut: tuple[float, str]  # accuracy of the best rule that ignores almost all of the input, and that rule
    recipe: Recipe
    strings: Callable[[int, int, Generator], Samples]  # draws n labelled strings of a length
    shortest: int = 1  # smallest length of a string

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

    def draw(self, train: int, holdout: int, length: int, generator: Generator) -> tuple[Samples, Samples]:
        """Draw training samples, then held-out ones, from one law."""
        return self.sample(train, length, generator), self.sample(holdout, length, generator)

    def sample(self, n: int, length: int, generator: Generator) -> Samples:
        """Draw n labelled strings."""
        if length < self.shortest:
            raise InputError(f"{self.name} needs a length of at least {self.shortest}. Got {length=}.")
        return self.strings(n, length, generator)

    def parse(self, text: str) -> list[int]:
        """Return the token ids of a string written with the task's symbols."""
        words = text.split()
        parts = words if max(map(len, self.symbols)) > 1 else list("".join(words))
        if unknown := [part for part in parts if part not in self.symbols]:
            symbols = " ".join(self.symbols)
            raise InputError(f"{unknown[0]!r} is not a symbol of {self.name}. Its symbols are: {symbols}.")
        return [self.symbols.index(part) for part in parts]


Classification = Task | Text  # what the trainer can learn


@lru_cache
def listops_task(trees: ListOpsTrees) -> Task:
    """Return the task listops with trees of a law."""
    return Task(
        "listops", (), "the value of nested list operations on digits", SYMBOLS, 10, 0.16,
        (0.342, "the first token alone: MIN is mostly 0, MAX 9, MED 4, SM anything"),
        Recipe(599, 200, blocks=10, learning_rate=1.0, learning_rate_decay=0.99),
        partial(list_operations, trees), trees.longest,
    )  # fmt: skip


TASKS = {task.name: task for task in (
    Task("parity", ("parity_check",), "is the number of ones odd?", ("0", "1"), 2, 0.5,
        (0.5, "none: every proper part of the string is independent of the label"),
        Recipe(40, 1000), parity),
    Task("even-pairs", ("even_pairs", "ueqpairs"), "is the number of neighbouring unequal bits odd?",
        ("0", "1"), 2, 0.5, (0.5, "none with a single token; first and last together decide it"),
        Recipe(40, 100), even_pairs),
    Task("missing-duplicate", ("missing_duplicate_string", "missdup"),
        "which bit was removed from a string written twice?", ("0", "1", "2"), 2, 0.5,
        (0.5125, "the first token alone: once in 40 strings it is the twin of the placeholder"),
        Recipe(40, 250), missing_duplicate, 2),
    Task("stack-manipulation", ("stack_manipulation", "stackman"),
        "what lies on top of a stack after some pushes and pops?", tuple("01234"), 3, 0.499865,
        (0.8333, "the last token alone: a push, two times in three, gives the label"),
        Recipe(40, 200), stack_manipulation),
    Task("cycle-navigation", ("cycle_navigation", "cycnav"), "where on a cycle of five does a walk end?",
        ("0", "1", "2"), 5, 0.2, (0.2, "none: one token leaves the sum of the others uniform"),
        Recipe(40, 750), cycle_navigation),
    Task("modular-arithmetic", ("modular_arithmetic_brackets", "mab"),
        "the value of a bracketed expression modulo 5", tuple(BRACKETS), 5, 0.29159,
        (0.29159, "always 0, since a product with a factor 0 is 0; the outermost operator adds nothing"),
        Recipe(40, 600), modular_arithmetic),
    Task("solve-equation", ("solve_equation", "soleq"), "the value of x in a bracketed equation modulo 5",
        tuple(EQUATION), 5, 0.2, (0.2, "none: no single token tells anything of x"),
        Recipe(40, 600), solve_equation, 3),
    listops_task(ListOpsTrees()),
)}  # fmt: skip


def find_task(name: str) -> Task:
    """Return the task with a name or an alias."""
    for task in TASKS.values():
        if name == task.name or name in task.aliases:
            return task
    if name == Text.name:
        raise InputError("The task text needs a file: semdiag train text --text FILE.")
    raise unknown_name("task", name, [*TASKS, Text.name])


def task_of(training: TrainingConfig) -> Classification:
    """Return the task or text of a run."""
    if training.text is not None:
        return Text(training.text)
    return find_task(training.task) if training.listops is None else listops_task(training.listops)


def configure(
    task: Classification, chosen: Mapping[str, Any], trees: ListOpsTrees | None = None
) -> tuple[ModelConfig, TrainingConfig]:
    """Complete a user's choices with the recipe of the task."""
    values = {**vars(task.recipe), **{name: value for name, value in chosen.items() if value is not None}}
    if values.get("optimizer", "sgd") != "sgd" and chosen.get("learning_rate") is None:
        values["learning_rate"] = ADAM_RATE
    if values.get("attention") in DRAWN:  # every seed keeps different keys
        values.setdefault("selection_seed", values.get("seed", TrainingConfig.seed))
    positions = padded_length(values["length"], values.get("k"), values.get("pad_as_token", False))
    values |= {"vocabulary_size": task.vocabulary_size, "classes": task.classes, "task": task.name}
    values |= {"listops": trees, "text": task.source if isinstance(task, Text) else None}
    model, training = (
        {f.name: v for f in fields(record) if (v := values.get(f.name)) is not None}
        for record in (ModelConfig, TrainingConfig)
    )
    return ModelConfig(**{**model, "length": positions}), TrainingConfig(**training)


def padded_length(length: int, k: int | None, pad_as_token: bool) -> int:
    """Return a model's number of positions for samples of a length: with ``pad_as_token`` a multiple of k."""
    return -(-length // k) * k if pad_as_token and k is not None and k > 0 else length


class Split(NamedTuple):
    """Labelled samples: tokens (N, L) int64 and labels (N,) int64."""

    tokens: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Split":
        """Return the samples on a device."""
        return Split(self.tokens.to(device), self.labels.to(device))


def draw_data(config: TrainingConfig, positions: int, pad_id: int, epoch: int = 0) -> tuple[Split, Split]:
    """Regenerate a run's training and held-out samples, padded; after epoch 0 fresh ones, and one held-out."""
    words = np.random.SeedSequence([config.seed, epoch]).generate_state(1, np.uint64)
    seed, holdout = (int(words[0] >> np.uint64(1)), 1) if epoch else (config.seed, config.holdout_samples)
    generator = torch.Generator().manual_seed(seed)
    task = task_of(config)
    n = config.train_samples
    if config.least_length is None:
        both = task.draw(n, holdout, config.length, generator)
    else:
        lengths = torch.randint(config.least_length, config.length + 1, (n + holdout,), generator=generator)
        tokens = torch.full((n + holdout, config.length), pad_id)
        labels = torch.empty(n + holdout).long()
        for length in sorted(set(lengths.tolist())):
            rows = (lengths == length).nonzero().flatten()
            (tokens[rows, :length], labels[rows]), _ = task.draw(len(rows), 1, length, generator)
        both = (tokens[:n], labels[:n]), (tokens[n:], labels[n:])
    first, second = (Split(F.pad(t, (0, positions - t.shape[1]), value=pad_id), labels) for t, labels in both)
    return first, second
