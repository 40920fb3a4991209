"""A number and what it counts, in words."""


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts.

    Args:
        number: how many.
        noun: in the singular; the plural adds an s.

    Example:
        >>> counted(1, "epoch"), counted(2, "epoch")
        ('1 epoch', '2 epochs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
