"""Numbers in words: counts, shares, ratios, intervals with their ends, and cells of tables."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from semdiag_files import counted as counted  # in words, too

FEWEST = 5  # fewest sequences or planes for an interval
UNKNOWN = "–"
Value = float | str | None  # a number, or what JSON has in its place


def layer_name(layer: int, modules: Sequence[str]) -> str:
    """Return a layer's number, and its module if the model's layers lie in several stacks."""
    stacks = {re.sub(r"\d+", "", module) for module in modules}
    return f"{layer} ({modules[layer]})" if len(stacks) > 1 and layer < len(modules) else str(layer)


def number_from_json(value: Value) -> float:
    """Return the number that :func:`~semdiag.measuring.findings.findings.json_ready` wrote; NaN for null."""
    if value is None:
        return math.nan
    if isinstance(value, str) and value not in ("inf", "-inf"):
        raise ValueError(f"Expected a number, null, 'inf' or '-inf'. Got {value!r}.")
    return float(value)


def number(value: Value, digits: int = 3) -> str:
    """Return a number to three digits; a whole number, mostly a count, in full."""
    value = number_from_json(value)
    if math.isnan(value):
        return UNKNOWN
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else significant(value, digits)


def significant(value: float, digits: int = 3) -> str:
    """Return a number to so many digits; thousands and millions as ``1,050``, not ``1.05e+03``."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text and abs(value) < 1e9 else text


def number_words(value: float, form: Callable[[float], str] = "{:.3g}".format) -> str:
    """Format a number; NaN is "undefined"."""
    return "undefined" if math.isnan(value) else form(value)


def ratio_words(ratio: float, digits: int = 2) -> str:
    """Return a ratio with some digits after the point, or with two significant ones if these would all be 0."""
    text = f"{ratio:.{digits}f}"
    return text if ratio == 0 or float(text) != 0 else f"{ratio:.2g}"


def percent(share: Value, form: str = ".1f", *, strict: bool = False, sign: str = "%") -> str:
    """Return a share in per cent, like ``92.6%``; if ``strict``, only 0 reads as 0 and only 1 as 100."""
    value = 100 * number_from_json(share)
    if math.isnan(value):
        return UNKNOWN
    text = f"{value:{form}}"
    if strict and 0 < value < 100 and float(text) in (0, 100):
        text = {"0.0": "< 0.1", "100.0": "> 99.9"}.get(f"{value:.1f}", f"{value:.1f}")
    return text + sign


strict_percent, whole_percent = partial(percent, strict=True), partial(percent, form=".0f", strict=True)


def interval(
    low: Value,
    high: Value,
    form: Callable[[float], str] | None = None,
    *,
    factor: float = 1,
    between: str = "",
    unknown: str = UNKNOWN,
) -> str:
    """Return an interval, like ``92.6–93.1`` or ``-0.2 to 0.1``; by default its ends have digits that differ."""
    first, last = factor * number_from_json(low), factor * number_from_json(high)
    if math.isnan(first) or math.isnan(last):
        return unknown
    forms = [form] if form else [partial(number, digits=digits) for digits in range(3, 7)]
    texts = [(each(first), each(last)) for each in forms]
    ends = next((pair for pair in texts if pair[0] != pair[1]), texts[0])
    return (between or (" to " if first < 0 or last < 0 else "–")).join(ends)


def interval_words(
    low: float,
    high: float,
    form: Callable[[float], str] = "{:.2f}".format,
    samples: int | None = None,
    level: str = "95% interval ",
) -> str:
    """Return an interval in words, or why there is none."""
    few = samples is not None and samples < FEWEST
    why = f"{counted(samples or 0, 'sample')}: too few for an interval" if few else "no interval"
    ends = interval(low, high, form, between=" to ", unknown="")
    return f"{level}{ends}" if ends else why


def limit_of_share(high: float, of: str = "inputs") -> str:
    """Return the one-sided 95% limit of a share of what was not seen, marked as one."""
    return f"up to {strict_percent(high) if high < 1 else '100%'} of {of} may (one-sided 95%)"


def count_of(some: int, every: int, thing: str) -> str:
    """Return a count with its denominator, like ``3 of 4 pairs``."""
    return f"{some:,} of {every:,} {thing}{'s' * (every != 1)}"


def span_words(values: list[float], form: str | Callable[[float], str]) -> str:
    """Return one number, or the range of several, all finite."""
    words_of = form.format if isinstance(form, str) else form
    low, high = (re.sub("^-", "−", words_of(end)) for end in (min(values), max(values)))
    signed = any(end.startswith(("−", "<", ">")) for end in (low, high))  # −3 to 98, 85 to > 99.9
    return low if low == high else f"{low} to {high}" if signed else f"{low}–{high}"


def percent_span(shares: Iterable[float]) -> str:
    """Return one share in per cent, or the range of several, like ``50–98%``."""
    return span_words(list(shares), partial(whole_percent, sign="")) + "%"


def text(*values: Any) -> str:
    """Join the words of a name."""
    return " ".join(map(plain, values))


def plain(value: Any) -> str:
    """Return a layer, a head, a seed or a word unchanged."""
    return UNKNOWN if value is None else str(value)


def finite(value: Value) -> str:
    """Return a number; a dash for an infinity."""
    numeric = number_from_json(value)
    return number(numeric if math.isfinite(numeric) else None)


def _formatted(form: str, value: Value) -> str:
    numeric = number_from_json(value)
    return UNKNOWN if math.isnan(numeric) else f"{numeric:{form}}"


count = partial(_formatted, ",.0f")
two_decimals, three_decimals, four_decimals = (partial(_formatted, form) for form in (".2f", ".3f", ".4f"))
three_digits, four_digits = partial(_formatted, ".3g"), partial(_formatted, ".4g")
fine_percent, rough_percent = partial(percent, form=".2f"), partial(percent, form=".3g")
percent_interval = partial(interval, factor=100)
