"""Very large and very small factors in words."""

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def powers_of_ten(low: float, high: float) -> str:
    """Return the range of several factors, in powers of ten.

    Args:
        low: decimal logarithm of the smallest.
        high: decimal logarithm of the largest.

    Example:
        >>> powers_of_ten(6.3, 12.1), powers_of_ten(7.9, 8.1)
        ('10⁶ to 10¹²', 'about 10⁸')
    """
    ends = power_of_ten(low), power_of_ten(high)
    return f"about {ends[0]}" if ends[0] == ends[1] else " to ".join(ends)


def factors(low: float, high: float) -> str:
    """Return the range of several factors, as plain numbers below a thousand.

    Args:
        low: decimal logarithm of the smallest.
        high: decimal logarithm of the largest.

    Example:
        >>> factors(0.3, 2.23), factors(0.5, 0.5), factors(2.0, 12.1)
        ('2 to 170', 'about 3.2', '10² to 10¹²')
    """
    if high >= 3:
        return powers_of_ten(low, high)
    ends = [f"{float(f'{10**end:.2g}'):g}" for end in (low, high)]
    return f"about {ends[0]}" if ends[0] == ends[1] else " to ".join(ends)


def power_of_ten(exponent: float) -> str:
    """Return the nearest whole power of ten, with a superscript.

    Args:
        exponent: decimal logarithm of the factor.

    Example:
        >>> power_of_ten(6.3), power_of_ten(-12.0)
        ('10⁶', '10⁻¹²')
    """
    return "10" + str(round(exponent)).translate(_SUPERSCRIPT)
