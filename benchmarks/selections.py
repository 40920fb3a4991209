"""What semdiag.check_selection costs, as a multiple of torch.topk of the same scores: rows of 4,096, float32.

Both take turns on the same rows, in wall-clock time of all threads. Scores are drawn anew for every part, so that
they come from memory.

    OMP_NUM_THREADS=2 python benchmarks/selections.py [--rows 131072]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import semdiag

KEYS, PART = 4096, 16_384


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def checked(scores: torch.Tensor, indices: torch.Tensor, **rule: object) -> None:
    found = semdiag.check_selection(scores, indices, **rule)
    assert not found.faults, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=131_072)
    rows = parser.parse_args().rows
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print("| k | rule | rows | topk s | check s | ratio | s per million rows |\n|---|---|---|---|---|---|---|")
    for k in (64, 512, 2048):
        for rule in ("none", "lengths"):
            times = []
            for _ in range(max(1, rows // PART)):
                scores = torch.randn(PART, KEYS)
                given = {}
                if rule == "lengths":
                    given["lengths"] = torch.randint(k, KEYS + 1, (PART,))
                    scores.masked_fill_(torch.arange(KEYS) >= given["lengths"][:, None], -torch.inf)
                indices = scores.topk(k, -1).indices
                plain = seconds(partial(scores.topk, k, -1))
                times.append((plain, seconds(partial(checked, scores, indices, **given))))
            plain, ours = (sum(column) for column in zip(*times, strict=True))
            ratio = statistics.median(own / theirs for theirs, own in times)
            number = len(times) * PART
            cells = (
                f"{k} | {rule} | {number:,} | {plain:.2f} | {ours:.2f} | {ratio:.2f} | {ours / number * 1e6:.1f}"
            )
            print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    main()
