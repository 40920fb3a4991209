"""Draw queries of an attention call: two from every stratum of positions, all with the same probability."""

import numpy as np
from numpy.typing import NDArray

PER_STRATUM = 2  # fewest draws that show the spread within a stratum


def draw_queries(queries: int, heads: int, count: int, of: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the fraction count / of of a sequence's queries, independently for every head.

    With n queries, m = ⌊n · count / of⌋ or one more, at random, so that m is n · count / of on average. The n
    positions are put on a circle, which is rotated at random and cut into m/2 strata of neighbours; two queries
    are drawn from each (one from the last, if m is odd). So no query is drawn twice, and by symmetry every query
    has probability count / of: plain means and percentiles of the draws estimate those of all queries, whatever
    the lengths.

    Source: stratified sampling; Cochran 1977, Sampling Techniques, §5.3. Deviation: the random rotation, without
        which
    strata of unequal size would need weights.

    Args:
        queries: n, of the sequence; at least 0.
        heads: number of independent rows of draws.
        count: see above, at least 1.
        of: at least ``count``.
        rng: supplies 3 + ⌊n · count / of⌋ numbers per head.

    Returns:
        (heads, most) positions among the n, stratum by stratum: columns 2s and 2s + 1 belong to stratum s; -1 (at
        the end) if a head has one fewer. At least one column.

    Example:
        >>> draw_queries(8, 2, 4, 8, np.random.default_rng(0)).tolist()
        [[2, 3, 1, 0], [7, 6, 0, 3]]
    """
    whole, rest = divmod(queries * count, of)
    chance = rng.random((heads, whole + 3))
    drawn = whole + (chance[:, :1] * of < rest)
    column = np.arange(whole + 1)
    first, last = column // PER_STRATUM * PER_STRATUM, column // PER_STRATUM * PER_STRATUM + PER_STRATUM
    start, stop = (np.minimum(end, drawn) * queries // np.maximum(drawn, 1) for end in (first, last))
    second = column % PER_STRATUM
    within = np.floor(chance[:, 2:] * (stop - start - second)).astype(np.int64)
    before = np.roll(within, 1, axis=1)  # the second draw skips what the first one took
    within += second * (within >= before)
    turned = (np.floor(chance[:, 1:2] * queries).astype(np.int64) + start + within) % max(queries, 1)
    return np.where(column < drawn, turned, -1)[:, : max(1, int(drawn.max(initial=0)))]
