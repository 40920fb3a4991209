"""The conditional sampler against enumeration and against naive rejection."""

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from semdiag_models.config import ListOpsTrees
from semdiag_models.listops import CLOSER, FIRST_OPENER, PAD, TreeWriter

SMALL = ListOpsTrees(shortest=1, longest=20, max_depth=4, min_arity=2, max_arity=10)
SHORTEST = 10


def naive_tree(rng, law, depth=1):
    """The source's recipe: digits with probability 3/4, arity first, then arguments, then the operator."""
    if depth == law.max_depth or rng.random() < 0.75:
        return [rng.randint(0, 9)]
    arguments = [naive_tree(rng, law, depth + 1) for _ in range(rng.randint(law.min_arity, law.max_arity))]
    return [FIRST_OPENER + rng.randint(0, 3), *(token for a in arguments for token in a), CLOSER]


def rejected_trees(n, law, shortest, seed=0):
    rng = random.Random(seed)
    kept = []
    while len(kept) < n:
        tree = naive_tree(rng, law)
        if shortest <= len(tree) <= law.longest:
            kept.append(tree)
    return kept


def conditioned_trees(n, law, shortest, seed=0):
    rng = np.random.default_rng(seed)
    writer = TreeWriter(law, rng)
    share = writer.length_laws[1] * (np.arange(law.longest + 1) >= shortest)
    tokens, _ = writer.write(rng.choice(share.size, n, p=share / share.sum()), law.longest)
    return [[token for token in row if token != PAD] for row in tokens.tolist()]


def enumerated_length_law(law, depth=1):
    """Law of the length by going through all combinations of arguments."""
    if depth == law.max_depth:
        return Counter({1: 1.0})
    below = enumerated_length_law(law, depth + 1)
    result = Counter({1: 0.75})
    arities = range(law.min_arity, law.max_arity + 1)
    for k in arities:
        for lengths in product(below.items(), repeat=k):
            total = 2 + sum(length for length, _ in lengths)
            result[total] += 0.25 / len(arities) * np.prod([p for _, p in lengths])
    return result


def shape(tree):
    return "".join("d" if t < FIRST_OPENER else ")" if t == CLOSER else "(" for t in tree)


def root_arity_and_operator(tree):
    depth = np.cumsum([(t >= FIRST_OPENER) - 2 * (t == CLOSER) for t in tree])
    # An argument of the root begins with a digit at depth 1 or with an opener that leads to depth 2.
    starts = [d == 1 if t < FIRST_OPENER else d == 2 and t != CLOSER for t, d in zip(tree, depth, strict=True)]
    return sum(starts), tree[0]


def position_of_first_nested_list(tree):
    return next((i for i, token in enumerate(tree[1:]) if token >= FIRST_OPENER), 0)


@pytest.fixture(scope="module")
def both():
    n = 10_000
    return rejected_trees(n, SMALL, SHORTEST), conditioned_trees(n, SMALL, SHORTEST)


@pytest.mark.slow
@pytest.mark.parametrize(
    "statistic",
    [
        len,
        shape,
        root_arity_and_operator,
        position_of_first_nested_list,
        lambda tree: (tree[1], tree[-2]),
        lambda tree: tuple(t for t in tree if t >= FIRST_OPENER),
    ],
    ids=["length", "shape", "root", "first nested list", "outer tokens", "operators in order"],
)
def test_the_sampler_has_the_law_of_rejection_sampling(both, statistic):
    naive, conditioned = (Counter(map(statistic, trees)) for trees in both)
    table = Counter()
    for case in naive | conditioned:
        cell = case if naive[case] + conditioned[case] >= 20 else "rare"
        table[cell, 0] += naive[case]
        table[cell, 1] += conditioned[case]
    cells = {cell for cell, _ in table}
    assert len(cells) > 10
    assert chi2_contingency([[table[cell, side] + 0 for side in (0, 1)] for cell in cells]).pvalue > 1e-5


@pytest.mark.slow
def test_a_sampler_of_a_slightly_different_law_would_be_noticed(both):
    naive = Counter(map(shape, both[0]))
    other = ListOpsTrees(shortest=1, longest=20, max_depth=4, min_arity=2, max_arity=9)
    wrong = Counter(map(shape, conditioned_trees(10_000, other, SHORTEST)))
    common = [case for case in naive if naive[case] + wrong[case] >= 20]
    assert chi2_contingency([[naive[case], wrong[case]] for case in common]).pvalue < 1e-5


@pytest.mark.parametrize(
    "law",
    [
        ListOpsTrees(shortest=1, longest=12, max_depth=1, min_arity=2, max_arity=3),
        ListOpsTrees(shortest=1, longest=14, max_depth=2, min_arity=2, max_arity=10),
        ListOpsTrees(shortest=1, longest=17, max_depth=3, min_arity=2, max_arity=3),
        ListOpsTrees(shortest=1, longest=40, max_depth=4, min_arity=1, max_arity=2),
    ],
)
def test_length_laws_agree_with_enumeration(law):
    exact = enumerated_length_law(law)
    expected = [exact[length] for length in range(law.longest + 1)]
    assert TreeWriter(law, np.random.default_rng(0)).length_laws[1] == pytest.approx(expected, rel=1e-12)


def test_the_share_of_kept_trees_is_the_measured_one():
    law = TreeWriter(ListOpsTrees(), np.random.default_rng(0)).length_laws[1]
    draws = 1_880_316  # of which the source kept 20 000
    share = law[501:].sum()
    assert abs(share - 20_000 / draws) < 4.5 * (share / draws) ** 0.5


def test_every_tree_has_the_length_that_was_asked_for():
    law = ListOpsTrees(shortest=1, longest=80, max_depth=6, min_arity=2, max_arity=5)
    possible = np.flatnonzero(TreeWriter(law, np.random.default_rng(0)).length_laws[1])
    tokens, _ = TreeWriter(law, np.random.default_rng(0)).write(possible.repeat(20), 90)
    assert tokens.shape == (20 * len(possible), 90)
    assert ((tokens != PAD).sum(1) == possible.repeat(20)).all()
    assert (np.diff((tokens == PAD).astype(int), axis=1) >= 0).all()
