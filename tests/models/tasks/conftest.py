"""The rules of the tasks, independent of how they are drawn; exact laws, and two ways to hold samples against one.
Margins are 4.5 standard errors; seeds are fixed."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from itertools import pairwise
from statistics import median

import pytest
from scipy.stats import chisquare

STANDARD_ERRORS = 4.5
LEAST_P_VALUE = 1e-5
LEAST_EXPECTED = 8  # cells with fewer expected cases are pooled


@pytest.fixture
def assert_share() -> Callable[[float, float, int], None]:
    """Call with a measured share, its exact value and the number of independent cases."""

    def check(measured: float, exact: float, n: int) -> None:
        margin = STANDARD_ERRORS * (exact * (1 - exact) / n) ** 0.5
        assert abs(float(measured) - exact) < margin, f"{float(measured)} is not {exact} ± {margin}"

    return check


@pytest.fixture
def assert_law() -> Callable[[Counter, Mapping[Hashable, float]], None]:
    """Call with a count of cases and the exact probability of each possible one."""

    def check(cases: Counter, law: Mapping[Hashable, float]) -> None:
        assert set(cases) <= set(law)
        assert sum(law.values()) == pytest.approx(1)
        n = cases.total()
        rare = [case for case, p in law.items() if n * p < LEAST_EXPECTED]
        cells = [(cases[case], n * p) for case, p in law.items() if n * p >= LEAST_EXPECTED]
        pooled = (sum(cases[case] for case in rare), n * sum(law[case] for case in rare))
        if pooled[1] >= LEAST_EXPECTED:
            cells.append(pooled)
        elif cells:
            cells[-1] = (cells[-1][0] + pooled[0], cells[-1][1] + pooled[1])
        if len(cells) == 1:
            return  # one possible case, and the first line has seen that no other occurs
        observed, expected = zip(*cells, strict=True)
        scale = n / sum(expected)
        assert chisquare(observed, [scale * e for e in expected]).pvalue > LEAST_P_VALUE

    return check


def _law_of_shapes(length: int, operators: str) -> Counter:
    if length <= 4:
        return Counter({{1: "d", 2: "-d", 3: "(d)", 4: "(-d)"}[length]: 1.0})
    law = Counter()
    for a in range(1, length - 3):
        for left, p in _law_of_shapes(a, operators).items():
            for right, q in _law_of_shapes(length - 3 - a, operators).items():
                for operator in operators:
                    law[f"({left}{operator}{right})"] += p * q / (length - 4) / len(operators)
    return law


@pytest.fixture
def law_of_shapes() -> Callable[[int, str], Counter]:
    """Call with a length and the operators: the law of the bracket expressions, every digit written d."""
    return _law_of_shapes


def _stack(tokens):
    stack = []
    for token in tokens:
        if token != 2:
            stack.append(token % 3)
        elif stack:
            stack.pop()
    return stack[-1] if stack else 2


def _tree(text):
    """The value of a ListOps tree, as a Python expression."""
    named = {"[MIN": "min([", "[MAX": "max([", "[MED": "median([", "[SM": "mod([", "]": "]),"}
    code = "".join(named.get(word, f"{word},") for word in text.split())
    return int(
        eval(code, {"median": lambda digits: int(median(digits)), "mod": lambda digits: sum(digits) % 10})[0]
    )


def _unknown(text):
    left, right = text.split("=")
    (x,) = [x for x in range(5) if eval(left.replace("x", str(x))) % 5 == int(right)]
    return x


_BY_TOKENS = {
    "parity": lambda tokens: tokens.count(1) % 2,
    "even-pairs": lambda tokens: sum(a != b for a, b in pairwise(tokens)) % 2,
    "missing-duplicate": lambda tokens: tokens[(tokens.index(2) + len(tokens) // 2) % len(tokens)],
    "stack-manipulation": _stack,
    "cycle-navigation": lambda tokens: sum(token - 1 for token in tokens) % 5,
}
_BY_TEXT = {"modular-arithmetic": lambda text: eval(text) % 5, "solve-equation": _unknown, "listops": _tree}


@pytest.fixture(scope="session")
def label_of() -> Callable[..., int]:
    """Call with a task and token ids: the label by a rule that is written out."""

    def label(task, tokens):
        tokens = [token for token in tokens if token != task.pad_id]
        if task.name in _BY_TOKENS:
            return _BY_TOKENS[task.name](tokens)
        joined = (" " if task.name == "listops" else "").join(task.symbols[token] for token in tokens)
        return _BY_TEXT[task.name](joined)

    return label
