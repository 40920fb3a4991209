"""Format numbers for sentences: 99.96% does not read as 100%, 0.04% not as 0%, and NaN is "undefined"."""

import math
from collections.abc import Callable

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.resampling import FEWEST


def percent(share: float, digits: int = 0) -> str:
    """Return a share in per cent, without the sign."""
    text = f"{100 * share:.{digits}f}"
    if not 0 < share < 1 or float(text) not in (0, 100):
        return text
    text = f"{100 * share:.1f}"
    return {"0.0": "< 0.1", "100.0": "> 99.9"}.get(text, text)


def ratio_words(ratio: float, digits: int = 2) -> str:
    """Return a ratio with some digits after the point, or with two significant ones if these would all be 0."""
    text = f"{ratio:.{digits}f}"
    return text if ratio == 0 or float(text) != 0 else f"{ratio:.2g}"


def number_words(value: float, form: Callable[[float], str] = "{:.3g}".format) -> str:
    """Format a number; NaN is "undefined"."""
    return "undefined" if math.isnan(value) else form(value)


def interval_words(
    low: float, high: float, form: Callable[[float], str] = "{:.2f}".format, samples: int | None = None
) -> str:
    """Return an interval in words, or that there is none."""
    if math.isnan(low) or math.isnan(high):
        if samples is None or samples >= FEWEST:
            return "no interval"
        return f"{counted(samples, 'sample')}: too few for an interval"
    return f"95% interval {form(low)} to {form(high)}"


def limit_of_share(high: float) -> str:
    """Return the one-sided 95% limit of a share of unseen inputs, marked as one."""
    return f"up to {percent(high, 1) if high < 1 else 100}% of inputs may (one-sided 95%)"
