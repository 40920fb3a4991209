"""Format numbers for sentences: 99.96% does not read as 100%, 0.04% not as 0%, and NaN is "undefined"."""

import math
from collections.abc import Callable

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.resampling import FEWEST


def percent(share: float, digits: int = 0) -> str:
    """Return a share in per cent, without the sign.

    Args:
        share: from 0 to 1.
        digits: after the point, 0 or 1; one more if a share other than 0 and 1 would read as 0 or 100.

    Example:
        >>> [percent(share) for share in (0, 0.0004, 0.004, 0.853, 0.996, 0.9999, 1)]
        ['0', '< 0.1', '0.4', '85', '99.6', '> 99.9', '100']
    """
    text = f"{100 * share:.{digits}f}"
    if not 0 < share < 1 or float(text) not in (0, 100):
        return text
    text = f"{100 * share:.1f}"
    return {"0.0": "< 0.1", "100.0": "> 99.9"}.get(text, text)


def ratio_words(ratio: float, digits: int = 2) -> str:
    """Return a ratio with some digits after the point, or with two significant ones if these would all be 0.

    Example:
        >>> [ratio_words(ratio) for ratio in (0.714, 0.004, 4e-05, 0)]
        ['0.71', '0.004', '4e-05', '0.00']
    """
    text = f"{ratio:.{digits}f}"
    return text if ratio == 0 or float(text) != 0 else f"{ratio:.2g}"


def number_words(value: float, form: Callable[[float], str] = "{:.3g}".format) -> str:
    """Format a number; NaN is "undefined".

    Args:
        value: a number, infinity or NaN.
        form: formats a number.

    Example:
        >>> number_words(0.12345), number_words(math.nan)
        ('0.123', 'undefined')
    """
    return "undefined" if math.isnan(value) else form(value)


def interval_words(
    low: float, high: float, form: Callable[[float], str] = "{:.2f}".format, samples: int | None = None
) -> str:
    """Return an interval in words, or that there is none.

    Args:
        low: its lower end; NaN if there is none.
        high: its upper end; NaN if there is none.
        form: formats a number.
        samples: number of resampled sequences; None if unknown.

    Example:
        >>> interval_words(0.61, 0.76), interval_words(math.nan, math.nan, samples=1)
        ('95% interval 0.61 to 0.76', '1 sample: too few for an interval')
    """
    if math.isnan(low) or math.isnan(high):
        if samples is None or samples >= FEWEST:
            return "no interval"
        return f"{counted(samples, 'sample')}: too few for an interval"
    return f"95% interval {form(low)} to {form(high)}"


def limit_of_share(high: float) -> str:
    """Return the one-sided 95% limit of a share of unseen inputs, marked as one.

    Args:
        high: the limit.

    Example:
        >>> limit_of_share(0.006), limit_of_share(1.0)
        ('up to 0.6% of inputs may (one-sided 95%)', 'up to 100% of inputs may (one-sided 95%)')
    """
    return f"up to {percent(high, 1) if high < 1 else 100}% of inputs may (one-sided 95%)"
