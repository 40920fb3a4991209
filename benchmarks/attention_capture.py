"""Cost of watching attention, as a multiple of the plain forward, at the shape of GPT-2 small.

python benchmarks/attention_capture.py --lengths 512 1024 2048 --threads 1

CPU time, forwards with and without the watch in turn, so that other load on the machine hits both alike.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing.attention_calls import AttentionCall, watch_attention

BLOCKS, HEADS, WIDTH = 12, 12, 768

# What is done with each call; for statistics see row_statistics.py.
CONSUMERS: dict[str, Callable[[AttentionCall], object]] = {
    "capture alone": lambda call: None,
}


class Block(nn.Module):
    """A block of GPT-2 small, without dropout; attention fused or by hand."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(future, float("-inf"))
            mixed = scores.softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


def ratio(
    model: nn.Module, x: Tensor, consume: Callable[[AttentionCall], object], rounds: int
) -> tuple[float, float]:
    """Seconds of a plain forward, and the watched forward as a multiple of it: medians over rounds."""
    plain, multiples = [], []
    for _ in range(rounds + 1):  # the first one warms up
        start = time.process_time()
        model(x)
        middle = time.process_time()
        with watch_attention(model, consume):
            model(x)
        plain.append(middle - start)
        multiples.append((time.process_time() - middle) / plain[-1])
    return median(plain[1:]), median(multiples[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} thread(s), load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, B = 1, float32")
    for fused in (True, False):
        model = nn.Sequential(*(Block(fused) for _ in range(BLOCKS))).eval()
        for length in options.lengths:
            x = torch.randn(1, length, WIDTH)
            for name, consume in CONSUMERS.items():
                with torch.inference_mode():
                    seconds, multiple = ratio(model, x, consume, options.rounds)
                kind = "fused" if fused else "by hand"
                print(
                    f"L = {length:5d}  {kind:8s} {name:15s} {seconds:6.2f} s plain  × {multiple:.3f}", flush=True
                )


if __name__ == "__main__":
    main()
