"""What a training monitor costs: CPU time of a step that is looked at, over a step that is not.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/monitor.py

The share of a whole training is (cost of a look) / (every × cost of a step). Steps with and without a look take
turns; the numbers are medians. A step is forward, backward and an SGD update.
"""

import argparse
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from semdiag import Monitor
from semdiag_models import Encoder, ModelConfig


class Causal(nn.Module):
    """A causal stack of torch's own parts, 8 heads."""

    def __init__(self, layers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, width), nn.Linear(width, 2)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens), mask, is_causal=True).mean(1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    start = time.process_time()
    loss = F.cross_entropy(model(tokens), tokens[:, 0] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return time.process_time() - start


def costs(model: nn.Module, tokens: torch.Tensor, repeats: int) -> tuple[float, float, float]:
    """CPU seconds of a step without a look, with one at a few rows, and with one at every row."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01)
    plain, looked, every = [], [], []
    for _ in range(repeats + 2):
        plain.append(step(model, optimizer, tokens))
        with Monitor(model, every=1, k=[8]):
            looked.append(step(model, optimizer, tokens))
        with Monitor(model, every=1, k=[8], rows="all"):
            every.append(step(model, optimizer, tokens))
    return statistics.median(plain[2:]), statistics.median(looked[2:]), statistics.median(every[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    recipe = ModelConfig(vocabulary_size=3, classes=2, length=40, blocks=5)
    cases = {
        "recipe's encoder, 25 × 40": (Encoder(recipe), torch.randint(2, (25, 40))),
        "nn.TransformerEncoder, causal, 8 × 256": (Causal(), torch.randint(100, (8, 256))),
        "25 million parameters, causal, 8 × 256": (Causal(8, 512), torch.randint(100, (8, 256))),
    }
    print(f"torch {torch.__version__}, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}")
    print("| model, batch × length | step ms | with a look ms | share at every=200 | with a look at all rows ms |")
    print("|---|---|---|---|---|")
    for name, (model, tokens) in cases.items():
        plain, looked, every = costs(model, tokens, arguments.repeats)
        share = (looked - plain) / (200 * plain)
        times = f"{1000 * plain:.1f} | {1000 * looked:.1f} | {100 * share:.2f}% | {1000 * every:.1f}"
        print(f"| {name} | {times} |", flush=True)


if __name__ == "__main__":
    main()
