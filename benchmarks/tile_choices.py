"""What choices of blocks for tiles keep on one text, and what the estimates take beside a forward pass.

    python benchmarks/tile_choices.py hf:PATH [TOKENS [TEXTS]]

The text is a pass key in filler text, or of a model without a language head the first of a file. Prints means over
layers and heads, and for each estimate its CPU time for all layers as a share of a forward pass.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import semdiag
from semdiag.capturing.inputs import TextOptions, read_batches
from semdiag.mathematics.block_estimates import ESTIMATES
from semdiag.questions.retrieval.measure import Maker

KINDS = [
    *(f"tile-64x64-{name}" for name in ESTIMATES), "tile-64x64", "tile-128x64-quest",
    *(f"skip-{nats}" for nats in (4, 6, 8, 10)),
]  # fmt: skip


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time that a function takes."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main(spec: str, tokens: int = 2048, texts: str = "") -> None:
    """Measure one model."""
    model = semdiag.load(spec)
    if texts:
        ids = read_batches(Path(texts), model, 1, TextOptions(tokens))[0]["input_ids"]
        tokens = ids.shape[1]
    else:
        ids = Maker(model).text("passkey", tokens, 0.5, 0).ids[None]
    calls: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        forward = seconds(lambda: model.module(input_ids=ids))
        with semdiag.watch_attention(model.module, lambda call: calls.append((call.q[0] * call.scale, call.k[0]))):
            model.module(input_ids=ids)
    table = semdiag.tiles(model, {"input_ids": ids}, KINDS, min(256, tokens // 4))
    print(table.groupby("kind")[["keys", "weight", "exact_weight", "top_weight", "recall"]].mean().round(4))
    places = torch.arange(tokens)
    for name, estimate in ESTIMATES.items():
        taken = sum(seconds(lambda q=q, k=k: estimate(q, k, places, 64, 64)) for q, k in calls)  # noqa: B023
        print(f"{name}: {taken / forward:.1%} of a forward pass of {forward:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:])
