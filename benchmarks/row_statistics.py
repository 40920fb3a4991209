"""Cost of the row statistics: beside the forward of a GPT-2-like stack, and beside the bare product q·kᵀ.

    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 python benchmarks/row_statistics.py

The stack has the shape of GPT-2 small (12 layers, 12 heads of width 64, causal ``scaled_dot_product_attention``,
B = 1, float32), without a language-model head, which would only make the forward dearer. The statistics of every
row are for all k ≤ 32. "One head" is a
single head of width 64 without a causal rule; its floor is the same tiles of q·kᵀ, written and nothing else. Times
are CPU times of this process (all threads), the least of several runs that take turns. Extra memory is how far the
peak of resident memory rises during the statistics in a process of its own, beyond what the forward (or q and k)
needed.
"""

import argparse
import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.mathematics.row_statistics import row_statistics

LAYERS, HEADS, WIDTH, K = 12, 12, 64, 32
LENGTHS = (512, 1024, 2048)
LONG = 32768


class Block(nn.Module):
    """Pre-norm block with causal attention; hands q and k to ``self.look`` if that is set."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.look: Callable[[Tensor, Tensor], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        if self.look is not None:
            self.look(q, k)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def stack(length: int) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))), torch.randn(1, length, HEADS * WIDTH)


def statistics_of(q: Tensor, k: Tensor, causal: bool = True) -> object:
    return row_statistics(q, k, WIDTH**-0.5, top=K, causal=causal)


def one_head() -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, 1, 1, LONG, WIDTH, generator=torch.Generator().manual_seed(0)))


def product(q: Tensor, k: Tensor) -> None:
    """The floor: q·kᵀ in tiles of 2^20 scores."""
    rows = 2**20 // LONG
    tile = torch.empty(rows, LONG)
    for start in range(0, LONG, rows):
        torch.mm(q[0, 0, start : start + rows], k[0, 0].T, out=tile)


def cpu_time(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def least(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """Least CPU time of each; they take turns, so that all see the same load."""
    for function in functions:
        function()
    return [min(times) for times in zip(*([cpu_time(f) for f in functions] for _ in range(repeats)), strict=True)]


def peak() -> float:
    """Peak resident memory in MB."""
    # Not getrusage: its peak is inherited from the process that started this one.
    return float(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) / 1024


@torch.inference_mode()
def alone(length: int) -> None:
    """Print by how much the statistics raise the peak of memory; for a process of its own."""
    if length == LONG:
        q, k = one_head()
        (q[0, 0, :64] @ k[0, 0].T).sum()
        without = peak()
        row_statistics(q, k, WIDTH**-0.5, top=K)
    else:
        model, x = stack(length)
        model(x)
        without = peak()
        ctypes.CDLL(None).malloc_trim(0)
        for block in model:
            block.look = statistics_of
        model(x)
    print(peak() - without)


def extra_memory(length: int, threads: int) -> float:
    command = [sys.executable, __file__, "--alone", str(length), "--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def forward_times(length: int, repeats: int) -> list[float]:
    """CPU seconds of the forward alone, and with the statistics of every layer."""
    model, x = stack(length)

    def run(function: Callable[[Tensor, Tensor], object] | None) -> None:
        for block in model:
            block.look = function
        model(x)

    return least([partial(run, function) for function in (None, statistics_of)], repeats)


@torch.inference_mode()
def report(threads: int, repeats: int) -> None:
    print(
        f"torch {torch.__version__}, {threads} threads, load {os.getloadavg()[0]:.1f}, K = {K}, least of {repeats}"
    )
    print("| | floor s | with statistics s | ratio | extra MB |")
    print("|---|---|---|---|---|")

    def line(name: str, times: list[float], memory: float) -> None:
        floor, ours = times
        columns = f"{floor:.2f} | {ours:.2f} | {ours / floor:.2f}"
        print(f"| {name} | {columns} | {memory:.0f} |", flush=True)

    for length in LENGTHS:
        times = forward_times(length, repeats)
        line(f"a forward of 12 × 12 × 64, L = {length}", times, extra_memory(length, threads))
    q, k = one_head()
    functions = product, partial(statistics_of, causal=False)
    times = least([partial(function, q, k) for function in functions], repeats)
    line(f"q·kᵀ of one head, L = {LONG}", times, extra_memory(LONG, threads))
    print(f"load at the end {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alone", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.alone:
        alone(arguments.alone)
    else:
        report(arguments.threads, arguments.repeats)


if __name__ == "__main__":
    main()
