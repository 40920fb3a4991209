"""The bridge from torch's randomness to numpy's."""

import numpy as np
import torch


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """Seed a numpy generator from a torch generator, so that what it draws is a function of the latter.

    Args:
        generator: source of randomness (CPU); one number is taken from it.

    Returns:
        A new numpy generator.

    Example:
        >>> one, same = (numpy_generator(torch.Generator().manual_seed(3)) for _ in range(2))
        >>> bool(one.integers(1000) == same.integers(1000))
        True
    """
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
