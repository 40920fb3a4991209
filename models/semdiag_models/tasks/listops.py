"""ListOps: the value of nested list operations on digits."""

import numpy as np
import torch
from torch import Tensor

from semdiag_models.errors import InputError
from semdiag_models.tasks.randomness import numpy_generator
from semdiag_models.tasks.task import Recipe, Task
from semdiag_models.tasks.tree_sampling import CLOSER, FIRST_OPENER, SYMBOLS, Integers, TreeLaw, TreeWriter

LEAST_ROUND = 100  # trees to draw at once, at least
FRUITLESS_ROUNDS = 50  # rounds without a new tree after which to stop looking


class ListOps(Task):
    """The value of nested operations on lists of digits."""

    name = "listops"
    aliases = ()
    summary = "the value of nested list operations on digits"
    symbols = SYMBOLS
    classes = 10
    majority = 0.16
    shortcut = (0.342, "the first token alone: MIN is mostly 0, MAX 9, MED 4, SM anything")
    recipe = Recipe(length=599, epochs=200, blocks=10, learning_rate=1.0, learning_rate_decay=0.99)

    def __init__(
        self,
        shortest: int = 501,
        longest: int = 599,
        max_depth: int = 10,
        min_arity: int = 2,
        max_arity: int = 10,
    ) -> None:
        if not 1 <= shortest <= longest:
            raise InputError(f"listops needs 1 ≤ shortest ≤ longest. Got {shortest} and {longest}.")
        if not 1 <= min_arity <= max_arity:
            raise InputError(f"listops needs 1 ≤ min_arity ≤ max_arity. Got {min_arity} and {max_arity}.")
        if max_depth < 1:
            raise InputError(f"listops needs max_depth of at least 1. Got max_depth={max_depth}.")
        self.shortest = shortest
        self.law = TreeLaw(longest, max_depth, min_arity, max_arity)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw n different trees, padded to the given length; see :meth:`Task.sample`."""
        self.require_length(length, self.law.longest)
        rng = numpy_generator(generator)
        writer = TreeWriter(self.law, rng)
        share = writer.length_laws[1] * (np.arange(self.law.longest + 1) >= self.shortest)
        if not share.any():
            raise InputError(f"{self._described()} has no string.")
        tokens: Integers = np.zeros((0, length), dtype=np.int64)
        labels: Integers = np.zeros(0, dtype=np.int64)
        fruitless = 0
        while len(tokens) < n:
            lengths = rng.choice(share.size, max(n - len(tokens), LEAST_ROUND), p=share / share.sum())
            drawn, values = writer.write(lengths, length)
            together = np.concatenate([tokens, drawn])
            new = _first_occurrences(together)
            fruitless = fruitless + 1 if new.size == len(tokens) else 0
            if fruitless == FRUITLESS_ROUNDS:
                raise InputError(f"{self._described()} gave {new.size} different strings only, not n={n}.")
            tokens, labels = together[new], np.concatenate([labels, values])[new]
        return torch.from_numpy(tokens[:n]), torch.from_numpy(labels[:n])

    def label(self, tokens: list[int]) -> int:
        """Evaluate innermost lists first; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        # Each open list holds its opener and the values so far; the outermost has no opener.
        open_lists: list[list[int]] = [[]]
        for token in tokens:
            if token >= FIRST_OPENER and token != CLOSER:
                open_lists.append([token])
                continue
            value = token
            if token == CLOSER:
                if len(open_lists) == 1:
                    raise InputError(f"{self.name} got a closer without an opener.")
                opener, *arguments = open_lists.pop()
                value = self._value(self.symbols[opener], arguments)
            open_lists[-1].append(value)
        if len(open_lists) > 1:
            raise InputError(f"{self.name} got {len(open_lists) - 1} openers without a closer.")
        if len(open_lists[0]) != 1:
            raise InputError(f"{self.name} needs one tree. Got {len(open_lists[0])} side by side.")
        return open_lists[0][0]

    def _value(self, opener: str, arguments: list[int]) -> int:
        """Value of one operator on its arguments."""
        k = len(arguments)
        if not self.law.min_arity <= k <= self.law.max_arity:
            allowed = f"{self.law.min_arity} to {self.law.max_arity} arguments"
            raise InputError(f"{self.name} operators take {allowed}. Got {opener} with {k}.")
        ascending = sorted(arguments)
        results = {
            "[MIN": ascending[0],
            "[MAX": ascending[-1],
            "[MED": ascending[k // 2] if k % 2 else (ascending[k // 2 - 1] + ascending[k // 2]) // 2,
            "[SM": sum(arguments) % 10,
        }
        return results[opener]

    def _described(self) -> str:
        law = self.law
        return (
            f"{self.name} with {self.shortest} to {law.longest} tokens, depth at most {law.max_depth} "
            f"and {law.min_arity} to {law.max_arity} arguments"
        )


def _first_occurrences(tokens: Integers) -> Integers:
    """Return indices of the rows that equal no earlier row, ascending."""
    first: dict[bytes, int] = {}
    for i, row in enumerate(tokens):
        first.setdefault(row.tobytes(), i)
    return np.array(list(first.values()))
