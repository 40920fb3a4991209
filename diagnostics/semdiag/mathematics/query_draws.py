"""Drawing queries of an attention call: two from every stratum of positions, every query with the same chance."""

import numpy as np
from numpy.typing import NDArray

PER_STRATUM = 2  # the fewest of which the spread within a stratum can be told


def draw_queries(queries: int, heads: int, count: int, of: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the share count / of of a sequence's queries, anew for every head.

    With n queries, m = ⌊n · count / of⌋ or one more, at random, so that m is n · count / of on the average. The n
    positions are put on a circle that is turned at random and cut into m/2 strata of neighbours; two queries are
    drawn from each (one from the last, if m is odd). So no query is drawn twice and, as all positions of a circle
    are alike, every query has the chance count / of: plain means and percentiles of what is drawn stand for all
    queries, whatever the lengths of the sequences.

    Source: stratified sampling; Cochran 1977, Sampling Techniques, §5.3. Deviation: the random turn, without which
    strata of unequal size would need weights.

    Args:
        queries: n, of the sequence; at least 0.
        heads: rows of draws, independent of each other.
        count: see above, at least 1.
        of: at least ``count``.
        rng: gives 3 + ⌊n · count / of⌋ numbers a head.

    Returns:
        (heads, most) positions among the n, stratum by stratum: columns 2s and 2s + 1 are of stratum s; -1 (at the
        end) where a head has one fewer. At least one column.

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
    before = np.roll(within, 1, axis=1)  # what the first draw of the stratum took, the second one leaves out
    within += second * (within >= before)
    turned = (np.floor(chance[:, 1:2] * queries).astype(np.int64) + start + within) % max(queries, 1)
    return np.where(column < drawn, turned, -1)[:, : max(1, int(drawn.max(initial=0)))]
