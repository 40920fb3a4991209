"""Draws of queries: every query has the same chance, none is drawn twice, two come from each stratum."""

import math

import numpy as np
import pytest

from semdiag.mathematics.sampled_intervals import draw_queries

HEADS = 20_000


@pytest.mark.parametrize(("queries", "count", "of"), [(8, 4, 8), (7, 3, 7), (5, 3, 16), (41, 16, 50), (6, 5, 6)])
def test_every_query_has_the_same_chance(queries, count, of):
    drawn = draw_queries(queries, HEADS, count, of, np.random.default_rng(0))
    chance = count / of
    share = np.bincount(drawn[drawn >= 0], minlength=queries) / HEADS
    # 5 standard deviations, for all positions: false alarm below 41 · 6e-7 were the seed not fixed.
    assert np.abs(share - chance).max() < 5 * math.sqrt(chance * (1 - chance) / HEADS)
    assert set(np.count_nonzero(drawn >= 0, axis=1)) <= {queries * count // of, queries * count // of + 1}
    for row in drawn[:500]:
        own = row[row >= 0]
        assert len(set(own.tolist())) == len(own)


def test_two_neighbours_on_the_circle_come_from_each_stratum():
    drawn = draw_queries(100, 500, 20, 100, np.random.default_rng(1))
    pairs = drawn.reshape(500, 10, 2)
    apart = np.abs(pairs[..., 0] - pairs[..., 1])
    assert np.minimum(apart, 100 - apart).max() < 10  # positions of a stratum
    assert len(np.unique(apart)) > 5


@pytest.mark.parametrize(("queries", "count", "of"), [(0, 4, 8), (1, 1, 1000)])
def test_nothing_drawn_is_a_column_of_none(queries, count, of):
    drawn = draw_queries(queries, 3, count, of, np.random.default_rng(0))
    assert drawn.shape == (3, 1)
    assert (drawn <= 0).all()
