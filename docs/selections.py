"""Write the selections that docs/commands/selections.md looks at: of four kernels, and of two engines."""

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

# 256 tokens, 4 layers, 6 of 64 experts each: the training engine computes in float32, the serving one in bfloat16.
scores = (draw.integers(0, 2**20, (256, 4, 64)) / 2**18 - 2).astype(np.float32)
training = np.argsort(-scores, kind="stable")[..., :6]
served = torch.from_numpy(scores).bfloat16().float().numpy()
serving = np.argsort(-served, kind="stable")[..., :6]
serving[40:50, 2, 0] = np.argmin(scores[40:50, 2], axis=-1)  # a bug of layer 2
np.savez("training.npz", routed_experts=training, scores=scores)
np.savez("serving.npz", routed_experts=serving.reshape(4, 64, 4, 6))  # batch, sequence, layers, k
