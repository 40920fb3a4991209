"""The measurements of ``benchmarks/on_gpu.sh`` that need more than a command.

    python benchmarks/on_gpu.py statistics|agreement|monitor [--device cuda] [--small]

Times are wall times between synchronisations, medians; with --small on a CPU they say that the code runs and
nothing else.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import semdiag
from semdiag_models import Encoder, ModelConfig


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time, after one run that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def row_statistics(device: torch.device, small: bool) -> None:
    """All statistics of a causal call of 12 heads against one flash forward of it, time and memory."""
    print("| length | flash ms | statistics ms | ratio | extra MB |\n|---|---|---|---|---|")
    for length in (64,) if small else (2048, 8192, 16384):
        draw = torch.Generator(device).manual_seed(0)
        q, k, v = torch.randn(3, 1, 12, length, 64, generator=draw, device=device)
        half = [part.to(torch.float32 if small else torch.bfloat16) for part in (q, k, v)]
        flash = seconds(lambda half=half: F.scaled_dot_product_attention(*half, is_causal=True), device, 5)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        ours = seconds(lambda q=q, k=k: semdiag.row_statistics(q, k, 0.125, top=32, causal=True), device, 3)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        extra = f"{(peak - before) / 2**20:.0f}" if device.type == "cuda" else "–"
        print(f"| {length} | {1000 * flash:.2f} | {1000 * ours:.1f} | {ours / flash:.1f} | {extra} |", flush=True)


def agreement(device: torch.device, small: bool) -> None:
    """Whether the device measures what the CPU measures, in float64: largest differences in nats."""
    torch.manual_seed(0)
    encoder = Encoder(ModelConfig(3, 2, 40, blocks=1 if small else 5)).double().eval()
    tokens = torch.randint(2, (4 if small else 200, 40))
    here, there = (semdiag.measure(encoder, tokens, k=(5,), device=name) for name in ("cpu", device.type))
    for column in ("dispersion", "dispersion_k5", "separation_k5", "weight_kept_k5"):
        print(f"{column}: {(here.queries[column] - there.queries[column]).abs().max():.1e}")
    drawn = [semdiag.measure(encoder, tokens, queries=8, device=name).queries for name in ("cpu", device.type)]
    print(f"the same queries drawn: {drawn[0]['query'].equals(drawn[1]['query'])}")


def monitor(device: torch.device, small: bool) -> None:
    """What a look of the monitor costs, as a share of a step."""
    encoder = Encoder(ModelConfig(3, 2, 40, blocks=1 if small else 5)).to(device).train()
    tokens = torch.randint(2, (25, 40), device=device)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(encoder(tokens), tokens[:, 0] % 2).backward()
        optimizer.step()

    plain = seconds(step, device, 2 if small else 30)
    with semdiag.Monitor(encoder, every=1, k=[8]) as watching:
        looked = seconds(step, device, 2 if small else 30)
    print(f"step {1000 * plain:.2f} ms, with a look {1000 * looked:.2f} ms, rows {len(watching.table)}")
    print(f"share of a training at every=200: {(looked - plain) / (200 * plain):.2%}")


PIECES = {"statistics": row_statistics, "agreement": agreement, "monitor": monitor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=[*PIECES])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="only see that it runs")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU: a dry run, no measurement of a GPU"
    print(f"torch {torch.__version__}, {name}")
    PIECES[options.piece](device, options.small)


if __name__ == "__main__":
    main()
