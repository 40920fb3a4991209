from collections import Counter

import pytest
import torch

from semdiag_models.tasks import TASKS

TASK = TASKS["solve-equation"]


def sample(n, length, seed=0):
    return TASK.sample(n, length, torch.Generator().manual_seed(seed))


def with_unknown(shapes):
    """Law of the equations whose left sides have the given law: start at every character of every shape."""
    law = Counter()
    for shape, p in shapes.items():
        for start in range(len(shape)):
            i = start
            while shape[i] != "d":
                i = (i + 1) % len(shape)
            law[f"{shape[:i]}x{shape[i + 1 :]}=d"] += p / len(shape)
    return law


@pytest.mark.parametrize("length", [3, 4, 5, 6, 7, 11, 13])
def test_equations_have_their_exact_law_up_to_the_digits(length, law_of_shapes, assert_law):
    texts = ("".join(TASK.symbols[token] for token in row) for row in sample(20_000, length)[0].tolist())
    shapes = Counter("".join("d" if c in "01234" else c for c in text) for text in texts)
    assert_law(shapes, with_unknown(law_of_shapes(length - 2, "+-")))


@pytest.mark.parametrize("length", [5, 40])
def test_labels_are_uniform(length, assert_law):
    assert_law(Counter(sample(40_000, length)[1].tolist()), dict.fromkeys(range(5), 0.2))


def test_the_label_is_uniform_whatever_the_right_side_is(assert_law):
    tokens, labels = sample(40_000, 40)
    assert (tokens[:, 38] == TASK.symbols.index("=")).all()
    together = Counter(zip(tokens[:, 39].tolist(), labels.tolist(), strict=True))
    assert_law(together, {(v, x): 1 / 25 for v in range(5) for x in range(5)})


def test_no_single_token_beats_the_shortcut():
    tokens, labels = sample(50_000, 40)
    for i in range(40):
        table = torch.bincount(tokens[:, i] * 5 + labels, minlength=60).view(-1, 5)
        best = table.amax(1).sum() / 50_000
        # The best of five labels for up to eleven tokens, chosen on the sample itself, gains at most 0.01.
        assert TASK.shortcut[0] - 0.01 < best < TASK.shortcut[0] + 0.01


def test_tokens_have_the_shares_of_the_specification():
    shares = torch.nn.functional.one_hot(sample(50_000, 40)[0], 12).float().mean(1)[:, :11]  # of each string
    margin = 0.0005 + 4.5 * shares.std(0) / 50_000**0.5  # the digits that are not printed, and standard errors
    expected = [0.041] * 5 + [0.0905, 0.169, 0.242, 0.242, 0.025, 0.025]
    assert ((shares.mean(0) - torch.tensor(expected)).abs() <= margin).all()


def test_the_label_is_the_only_solution():
    tokens, labels = sample(500, 40)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        left, _, right = "".join(TASK.symbols[token] for token in row).partition("=")
        assert [x for x in range(5) if eval(left.replace("x", str(x))) % 5 == int(right)] == [label]
