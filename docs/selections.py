"""Write the selections that docs/commands/selections.md looks at: what four kernels return for a row of scores."""

import numpy as np
import torch

K, KEYS = 2048, 8320
draw = np.random.default_rng(0)


def chosen(scores: np.ndarray) -> np.ndarray:
    """The k largest scores, of equal ones the first."""
    return np.argsort(-scores, kind="stable")[:K]


# An indexer with a ReLU: 100 winners, and 8,220 exact zeros.
degenerate = np.zeros(KEYS, np.float32)
degenerate[draw.permutation(KEYS)[:100]] = 1
short = chosen(degenerate)
short[-924:] = -1  # a kernel that has room for no more than 1,024 ties
# Scores that differ.
plain = draw.integers(0, 2**20, KEYS).astype(np.float32) / 2**20
rounded = chosen(torch.from_numpy(plain).bfloat16().float().numpy())  # an engine that computes in bfloat16
dropped = chosen(plain)
dropped[7] = np.argmin(plain)  # a kernel that loses a candidate
np.savez(
    "kernels.npz",
    scores=np.stack([degenerate, degenerate, plain, plain]),
    indices=np.stack([chosen(degenerate), short, rounded, dropped]),
)
