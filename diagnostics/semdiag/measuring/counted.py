"""A number and what it counts, in words."""


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
