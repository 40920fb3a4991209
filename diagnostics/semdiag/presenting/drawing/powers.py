"""Very large and very small factors in words."""

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def powers_of_ten(low: float, high: float) -> str:
    """Return the range of several factors, in powers of ten."""
    ends = power_of_ten(low), power_of_ten(high)
    return f"about {ends[0]}" if ends[0] == ends[1] else " to ".join(ends)


def factors(low: float, high: float) -> str:
    """Return the range of several factors, as plain numbers below a thousand."""
    if high >= 3:
        return powers_of_ten(low, high)
    ends = [f"{float(f'{10**end:.2g}'):g}" for end in (low, high)]
    return f"about {ends[0]}" if ends[0] == ends[1] else " to ".join(ends)


def power_of_ten(exponent: float) -> str:
    """Return the nearest whole power of ten, with a superscript."""
    return "10" + str(round(exponent)).translate(_SUPERSCRIPT)
