"""What capture and Monitor cost a forward pass, beside the floor: two modes of torch's that do nothing.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/capture_overhead.py

Each measured forward is paired with a plain one just before it, and the kinds take turns, so that other load
on the machine hits all alike. CPU time; the numbers are medians of the paired ratios, and their quartiles.
*empty modes*: a function mode and a dispatch mode of Python, without which nothing can be seen below Python;
*watch*: ``watch_attention`` with a consumer that does nothing; *capture*: ``semdiag.capture`` with its
statistics; *a look*: a forward that ``Monitor`` looks at (it looks at one in 200 by default).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import semdiag


class EmptyFunctionMode(TorchFunctionMode):
    """Runs what it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class EmptyDispatchMode(TorchDispatchMode):
    """Runs what it is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Toy(nn.Module):
    """Attention by hand as in a lecture: one head, width 16."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return x + self.out(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)


class Block(nn.Module):
    """A block of GPT-2 small, without dropout, its attention by hand."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 12, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def gpt2(width: int, layers: int, heads: int) -> nn.Module:
    """GPT-2 of transformers without a head, with random weights, on its fused attention."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=1000, n_positions=1024)
    return GPT2Model._from_config(config, attn_implementation="sdpa")


def empty(model: nn.Module) -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(EmptyDispatchMode())
    stack.enter_context(EmptyFunctionMode())
    return stack


KINDS: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
    "empty modes": empty,
    "watch": lambda model: semdiag.watch_attention(model, lambda call: None),
    "capture": semdiag.capture,
    "a look": lambda model: semdiag.Monitor(model, every=1),
}


def ratios(model: nn.Module, x: Tensor, rounds: int) -> tuple[float, dict[str, list[float]]]:
    """Median seconds of a plain forward; of each kind, its seconds over those of the plain forward before it."""
    plain, multiples = [], {name: [] for name in KINDS}
    for turn in range(rounds + 1):  # the first one warms up
        for name, context in KINDS.items():
            model.train(name == "a look")  # without dropout: the same forward
            start = time.process_time()
            model(x)
            middle = time.process_time()
            with context(model):
                model(x)
            end = time.process_time()
            if turn:
                plain.append(middle - start)
                multiples[name].append((end - middle) / (middle - start))
    return statistics.median(plain), multiples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    by_hand = nn.Sequential(*(Block() for _ in range(12)))
    drawn = partial(torch.randint, 1000)
    cases = {
        "toy by hand, 1 × 16, L = 16": (Toy(), torch.randn(1, 16, 16)),
        "toy GPT-2, 2 × 32, L = 16": (gpt2(32, 2, 2), drawn((1, 16))),
        "GPT-2 small, fused, L = 64": (gpt2(768, 12, 12), drawn((1, 64))),
        "GPT-2 small, fused, L = 512": (gpt2(768, 12, 12), drawn((1, 512))),
        "its shape by hand, L = 64": (by_hand, torch.randn(1, 64, 768)),
        "its shape by hand, L = 512": (by_hand, torch.randn(1, 512, 768)),
    }
    print(f"{options.threads} thread(s), load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, float32")
    print(f"| model, layers × width, length | plain ms | {' | '.join(KINDS)} |")
    print(f"|---|---|{'---|' * len(KINDS)}")
    for name, (model, x) in cases.items():
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        rounds = options.rounds * (10 if name.startswith("toy") else 1)
        with torch.no_grad():
            seconds, multiples = ratios(model, x, rounds)
        cells = []
        for values in multiples.values():
            low, middle, high = statistics.quantiles(values, n=4)
            cells.append(f"{middle:.2f} ({low:.2f}–{high:.2f})")
        print(f"| {name} | {1000 * seconds:.1f} | {' | '.join(cells)} |", flush=True)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
