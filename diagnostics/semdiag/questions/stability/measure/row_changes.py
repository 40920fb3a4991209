"""How noise changes softmax rows: numbers for each pair of rows."""

from torch import Tensor

from semdiag.mathematics.softmax_secants import (
    log_odds_of_largest,
    score_change,
    score_range_change,
    weight_change,
)
from semdiag.measuring.calls.scored_rows import ScoredRows


def row_changes(clean: ScoredRows, noisy: ScoredRows) -> dict[str, Tensor]:
    """Compare each clean row with its noisy one."""
    # Rows that do not count have no softmax: they get a key, and are dropped afterwards.
    kept_clean, kept_noisy = (rows.selected | ~rows.counted[..., None] for rows in (clean, noisy))
    pair = clean.scores, noisy.scores, kept_clean, kept_noisy
    return {
        "kept": clean.kept,
        "weight_change": weight_change(*pair),
        "score_change": score_change(*pair),
        "score_change_max": score_change(*pair, order=float("inf")),
        "score_change_range": score_range_change(*pair),
        "log_odds": (log_odds_of_largest(clean.scores, kept_clean) + log_odds_of_largest(noisy.scores, kept_noisy))
        / 2,
        "same_set": (clean.selected == noisy.selected).all(-1),
        "dispersion": clean.dispersion.maximum(noisy.dispersion),
        "separation": clean.separation.minimum(noisy.separation),
    }
