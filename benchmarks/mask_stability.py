"""What semdiag mask-stability costs, as a multiple of the plain forwards it needs: 5 levels × 5 draws, length 40.

Plain forwards and the probe take turns, in CPU time of one thread: other work on the machine slows both.

    python benchmarks/mask_stability.py [--samples 500]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from semdiag.questions.mask_stability.measure import NoisePlan, noise_tables
from semdiag_models import Encoder, ModelConfig

LEVELS, DRAWS, BATCH = (0.001, 0.003, 0.01, 0.03, 0.1), 5, 100


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def forwards(encoder: Encoder, tokens: torch.Tensor) -> None:
    """One clean pass and one for every level and draw."""
    with torch.inference_mode():
        for _ in range(1 + len(LEVELS) * DRAWS):
            for batch in tokens.split(BATCH):
                encoder(batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}")
    print("| attention | samples | plain s | mask-stability s | ratio |\n|---|---|---|---|---|")
    for attention in ("full", "topk"):
        plan = NoisePlan(LEVELS, DRAWS)
        config = ModelConfig(3, 2, 40, attention, None if attention == "full" else 5)
        torch.manual_seed(0)
        encoder = Encoder(config).eval()
        tokens = torch.randint(2, (arguments.samples, 40))
        parts = tokens.split(BATCH)
        forwards(encoder, parts[0][:8])
        noise_tables(encoder, parts[0][:8], None, plan)
        times = []
        for part in parts:
            plain = seconds(partial(forwards, encoder, part))
            probe = seconds(partial(noise_tables, encoder, part, None, plan, batch_size=BATCH))
            times.append((plain, probe))
        plain, probe = (sum(column) for column in zip(*times, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in times)
        print(f"| {attention} | {arguments.samples} | {plain:.2f} | {probe:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
