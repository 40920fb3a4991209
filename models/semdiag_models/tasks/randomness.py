"""The bridge from torch's randomness to numpy's."""

import numpy as np
import torch


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """Seed a numpy generator from a torch generator, so that what it draws is a function of the latter."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
