"""Numbers in words, and cells of tables.

Six functions format numbers: :func:`number`, :func:`count`, :func:`decimals`, :func:`percent`, :func:`interval`
and :func:`span_words`. The others word what these return.
"""

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


def number(value: Value, digits: int = 3, *, unknown: str = UNKNOWN, infinite: str | None = None) -> str:
    """Return a number to some digits; a whole number, mostly a count, in full; thousands as ``1,050``."""
    value = number_from_json(value)
    if math.isnan(value):
        return unknown
    if math.isinf(value) and infinite is not None:
        return infinite
    if value.is_integer() and abs(value) < 1e9:
        return f"{value:.0f}"
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text and abs(value) < 1e9 else text


def duration(seconds: float) -> str:
    """Return a time in words: "45 s", "12 min", "3 h 5 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    whole_minutes = round(seconds / 60)
    if whole_minutes < 60:
        return f"{whole_minutes} min"
    return f"{whole_minutes // 60} h {whole_minutes % 60} min"


def count(value: Value) -> str:
    """Return a count, like ``12,345``."""
    numeric = number_from_json(value)
    return UNKNOWN if math.isnan(numeric) else f"{numeric:,.0f}"


def decimals(value: Value, places: int = 2) -> str:
    """Return a number with some digits after the point, or with two significant ones if these would all be 0."""
    numeric = number_from_json(value)
    if math.isnan(numeric):
        return UNKNOWN
    text = f"{numeric:.{places}f}"
    return text if numeric == 0 or float(text) != 0 else f"{numeric:.2g}"


def percent(share: Value, form: str = ".1f", *, strict: bool = False, sign: str = "%") -> str:
    """Return a share in per cent, like ``92.6%``; if ``strict``, only 0 reads as 0 and only 1 as 100."""
    value = 100 * number_from_json(share)
    if math.isnan(value):
        return UNKNOWN
    text = f"{value:{form}}"
    if strict and 0 < value < 100 and float(text) in (0, 100):
        text = {"0.0": "< 0.1", "100.0": "> 99.9"}.get(f"{value:.1f}", f"{value:.1f}")
    return text + sign


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
    first = factor * number_from_json(low)
    last = factor * number_from_json(high)
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
    ends = interval(low, high, form, between=" to ", unknown="")
    if ends:
        return f"{level}{ends}"
    if samples is not None and samples < FEWEST:
        return f"{counted(samples, 'sample')}: too few for an interval"
    return "no interval"


def limit_of_share(high: float, of: str = "inputs") -> str:
    """Return the one-sided 95% limit of a share of what was not seen, marked as one."""
    share = percent(high, strict=True) if high < 1 else "100%"
    return f"up to {share} of {of} may (one-sided 95%)"


def count_of(part: int, total: int, noun: str) -> str:
    """Return a count with its denominator, like ``3 of 4 pairs``."""
    return f"{part:,} of {counted(total, noun)}"


def span_words(values: list[float], form: str | Callable[[float], str]) -> str:
    """Return one number, or the range of several, all finite."""
    words_of = form.format if isinstance(form, str) else form
    low, high = (re.sub("^-", "−", words_of(end)) for end in (min(values), max(values)))
    signed = any(end.startswith(("−", "<", ">")) for end in (low, high))  # −3 to 98, 85 to > 99.9
    return low if low == high else f"{low} to {high}" if signed else f"{low}–{high}"


def percent_span(shares: Iterable[float]) -> str:
    """Return one share in per cent, or the range of several, like ``50–98%``."""
    return span_words(list(shares), partial(percent, form=".0f", strict=True, sign="")) + "%"


def text(*values: Any) -> str:
    """Join the words of a name."""
    return " ".join(map(plain, values))


def plain(value: Any) -> str:
    """Return a layer, a head, a seed or a word unchanged."""
    return UNKNOWN if value is None else str(value)
