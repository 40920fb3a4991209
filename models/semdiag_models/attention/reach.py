"""Receptive fields under a mask, and tasks that a model with this mask cannot represent, whatever its weights."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from semdiag_models.attention.kinds import ATTENTIONS, DRAWN
from semdiag_models.attention.selection import random_priorities, select_keys
from semdiag_models.model_config import ModelConfig
from semdiag_models.tasks import Task
from semdiag_models.tasks.bracket_expressions import MODULUS
from semdiag_models.tasks.stack_manipulation import POP, PUSH_0

LONGEST = 256  # longer inputs are not examined
_TRIED = 1000  # sets of inputs tried
Witness = list[tuple[list[int], int]]  # inputs, and for each a label that is not its own


def receptive_fields(config: ModelConfig) -> Tensor:
    """Return which tokens of the input each pooled output can depend on."""
    length, front = config.length, config.cls_tokens
    positions = length + config.extra_tokens
    seen = torch.zeros(positions, length)
    seen[front : front + length] = torch.eye(length)
    for layer in range(config.blocks):
        seen = ((_steps(config, layer) @ seen) > 0).float()
    return (seen[:1] if config.pooling == "cls" else seen) > 0


def _steps(config: ModelConfig, layer: int) -> Tensor:
    """Return (P, P): 1 if a position sees another in one block; it sees itself by the residual stream."""
    positions = config.length + config.extra_tokens
    if ATTENTIONS[config.attention].keeps != "fixed":
        return torch.ones(positions, positions)
    everywhere, apart = config.everywhere, not config.cls_as_key
    blank, order = torch.zeros(1, config.heads, positions, 1), None
    if config.attention in DRAWN:
        cpu = torch.device("cpu")
        order = random_priorities(config.selection_seed, config.blocks, config.heads, positions, cpu)[layer]
    kept = select_keys(config.attention, config.k, blank, blank, 1.0, None, everywhere, order, apart=apart)
    assert kept is not None  # a fixed set
    steps = torch.zeros(config.heads, positions, positions + 1)
    steps = steps.scatter(2, kept[0].where(kept[0] >= 0, positions), 1.0).amax(0)[:, :positions]
    steps[: everywhere[0]] = 1.0
    steps[positions - everywhere[1] :] = 1.0
    return steps + torch.eye(positions)


@lru_cache(maxsize=256)
def cannot_represent(task: Task, config: ModelConfig, length: int | None = None) -> bool:
    """Return whether no weights can make a model with this mask right on every input of the task."""
    length = config.length if length is None else length
    fixed = ATTENTIONS[config.attention].keeps == "fixed"
    if not fixed or task.name not in WITNESSES or length > LONGEST:
        return False
    fields = {tuple(row.nonzero().flatten().tolist()) for row in receptive_fields(config)[:, :length]}
    if any(len(field) == length for field in fields):
        return False
    return any(_contradicts(task, inputs, fields) for inputs in islice(WITNESSES[task.name](task, length), _TRIED))


def _contradicts(task: Task, inputs: Witness, fields: set[tuple[int, ...]]) -> bool:
    labels = [task.label(tokens) for tokens, _ in inputs]
    assert all(label != other for label, (_, other) in zip(labels, inputs, strict=True))

    def seen(field: tuple[int, ...], of: list[int]) -> Counter[tuple[object, ...]]:
        return Counter((c, *(tokens[at] for at in field)) for (tokens, _), c in zip(inputs, of, strict=True))

    return all(seen(field, labels) == seen(field, [other for _, other in inputs]) for field in fields)


def _two_bits(length: int, places: Iterator[tuple[int, int]]) -> Iterator[Witness]:
    """Yield inputs of zeros except for two bits, whose sum modulo 2 is the label."""
    for a, b in places:
        inputs: Witness = []
        for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
            tokens = [0] * length
            tokens[a], tokens[b] = first, second
            inputs.append((tokens, 1 - (first ^ second)))
        yield inputs


def _parity(task: Task, length: int) -> Iterator[Witness]:
    return _two_bits(length, ((a, b) for b in reversed(range(length)) for a in range(b)))


def _even_pairs(task: Task, length: int) -> Iterator[Witness]:
    return _two_bits(length, iter([(0, length - 1)] * (length > 1)))


def _missing_duplicate(task: Task, length: int) -> Iterator[Witness]:
    """Yield two pairs of inputs that differ in whether a token is missing, seen by different positions."""
    half = length // 2

    def hidden(at: int, bit: int, other: int, value: int) -> Iterator[list[int]]:
        for place in (at, at + half):
            tokens = [0] * (2 * half) + [task.pad_id] * (length % 2)
            for position, one in ((at, bit), (at + half, bit), (other, value), (other + half, value)):
                tokens[position] = one
            tokens[place] = 2
            yield tokens

    for a in range(half):
        for b in range(a + 1, half):
            inputs: Witness = []
            for at, other in ((a, b), (b, a)):
                inputs += [(tokens, 0) for tokens in hidden(at, 1, other, 0)] * 2
                inputs += [(tokens, 1) for value in (0, 1) for tokens in hidden(at, 0, other, value)]
            yield inputs


def _stack_manipulation(task: Task, length: int) -> Iterator[Witness]:
    """Yield inputs in which the last two actions decide which of two bottom bits comes to the top."""
    bits = 3 + (length - 5) % 2
    fill = (length - bits - 2) // 2
    if fill < 0:
        return
    inputs: Witness = []
    for top, third in ((0, 1), (1, 0)):
        start = [0] * (bits - 3) + [third, 0, top] + [PUSH_0, POP] * fill
        inputs += [([*start, PUSH_0, POP], 1 - top), ([*start, POP, POP], 1 - third)]
    yield inputs


def _cycle_navigation(task: Task, length: int) -> Iterator[Witness]:
    """Yield inputs with up to four steps forward at each end, for every sum of two residues."""
    ends = MODULUS - 1
    if length < 2 * ends:
        return
    middle = [1] * (length - 2 * ends)
    residues = {n: [2] * n + [1] * (ends - n) for n in range(MODULUS)}
    yield [([*residues[a], *middle, *residues[b]], (a + b + 1) % MODULUS) for a in residues for b in residues]


def _filler(length: int) -> str:
    """Return an expression of this many characters with value 0."""
    short = {1: "0", 2: "-0", 3: "(0)", 4: "(-0)"}
    return short[length] if length in short else f"(0+{_filler(length - 4)})"


def _modular_arithmetic(task: Task, length: int) -> Iterator[Witness]:
    """Yield sums of a digit at the start and one at the end."""
    if length >= 9:
        digits = range(MODULUS)
        middle = _filler(length - 8)
        yield [(task.parse(f"({a}+({middle}+{b}))"), (a + b + 1) % MODULUS) for a in digits for b in digits]


def _solve_equation(task: Task, length: int) -> Iterator[Witness]:
    """Yield equations for the summand to a digit at the start, with the sum after the equals sign."""
    if length >= 11:
        digits = range(MODULUS)
        middle = _filler(length - 10)
        yield [(task.parse(f"({a}+({middle}+x))={v}"), (v - a + 1) % MODULUS) for a in digits for v in digits]


WITNESSES: dict[str, Callable[[Task, int], Iterator[Witness]]] = {
    "parity": _parity,
    "even-pairs": _even_pairs,
    "missing-duplicate": _missing_duplicate,
    "stack-manipulation": _stack_manipulation,
    "cycle-navigation": _cycle_navigation,
    "modular-arithmetic": _modular_arithmetic,
    "solve-equation": _solve_equation,
}
