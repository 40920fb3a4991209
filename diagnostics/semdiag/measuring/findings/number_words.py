"""Format numbers for sentences: 99.96% does not read as 100%, 0.04% not as 0%, and NaN is "undefined"."""

import math
from collections.abc import Callable

from semdiag.measuring.findings.resampling import FEWEST


def percent(share: float, digits: int = 0) -> str:
    """Say a share in per cent, without the sign.

    Args:
        share: from 0 to 1.
        digits: after the point, 0 or 1; one more where a share that is neither 0 nor 1 would read as 0 or 100.

    Example:
        >>> [percent(share) for share in (0, 0.0004, 0.004, 0.853, 0.996, 0.9999, 1)]
        ['0', '< 0.1', '0.4', '85', '99.6', '> 99.9', '100']
    """
    said = f"{100 * share:.{digits}f}"
    if not 0 < share < 1 or float(said) not in (0, 100):
        return said
    said = f"{100 * share:.1f}"
    return {"0.0": "< 0.1", "100.0": "> 99.9"}.get(said, said)


def ratio_words(ratio: float, digits: int = 2) -> str:
    """Say a ratio with some digits after the point, or with two that count where these would all be 0.

    Args:
        ratio: a number.
        digits: after the point.

    Example:
        >>> [ratio_words(ratio) for ratio in (0.714, 0.004, 4e-05, 0)]
        ['0.71', '0.004', '4e-05', '0.00']
    """
    said = f"{ratio:.{digits}f}"
    return said if ratio == 0 or float(said) != 0 else f"{ratio:.2g}"


def number_words(value: float, said: Callable[[float], str] = "{:.3g}".format) -> str:
    """Format a number; NaN is "undefined".

    Args:
        value: a number, infinity or NaN.
        said: a number in words.

    Example:
        >>> number_words(0.12345), number_words(math.nan)
        ('0.123', 'undefined')
    """
    return "undefined" if math.isnan(value) else said(value)


def samples_words(count: int) -> str:
    """A number of samples per model in words: ``1 sample per model``, ``500 samples per model``."""
    return f"{count} sample{'' if count == 1 else 's'} per model"


def keys_words(count: int) -> str:
    """A number of keys, as in ``1 key``, ``5 keys``."""
    return f"{count} key{'s' * (count != 1)}"


def interval_words(
    low: float, high: float, said: Callable[[float], str] = "{:.2f}".format, samples: int | None = None
) -> str:
    """An interval in a sentence, or that there is none.

    Args:
        low: its lower end; NaN: there is none.
        high: its upper end; NaN likewise.
        said: a number in words.
        samples: how many sequences were resampled, where that is known.

    Example:
        >>> interval_words(0.61, 0.76), interval_words(math.nan, math.nan, samples=1)
        ('95% interval 0.61 to 0.76', '1 sample: too few for an interval')
    """
    if math.isnan(low) or math.isnan(high):
        few = samples is not None and samples < FEWEST
        return f"{samples} sample{'s' * (samples != 1)}: too few for an interval" if few else "no interval"
    return f"95% interval {said(low)} to {said(high)}"
