from collections import Counter

import numpy as np
import pytest

from semdiag_models.tasks import draw_expressions

SYMBOLS = (*"01234", "+", "-", "*", "(", ")")


def drawn(n, length, operators="+-*", seed=0):
    tokens, values = draw_expressions(n, length, SYMBOLS, operators, np.random.default_rng(seed))
    return ["".join(SYMBOLS[token] for token in row) for row in tokens], values


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 9, 12])
@pytest.mark.parametrize("operators", ["+-", "+-*"])
def test_shapes_have_their_exact_law(length, operators, law_of_shapes, assert_law):
    texts, _ = drawn(20_000, length, operators)
    shapes = Counter("".join("d" if c in "01234" else c for c in text) for text in texts)
    assert_law(shapes, law_of_shapes(length, operators))


def test_digits_are_uniform_and_independent(assert_law):
    digits = Counter((text[1], text[3]) for text in drawn(20_000, 5)[0])
    assert_law(digits, {(a, b): 1 / 25 for a in "01234" for b in "01234"})


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 21, 40, 41])
def test_values_agree_with_python(length):
    texts, values = drawn(300, length)
    assert [eval(text) % 5 for text in texts] == values.tolist()  # the drawn texts are legal Python
