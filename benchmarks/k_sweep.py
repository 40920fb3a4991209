"""What semdiag k-sweep --rerun costs, as a multiple of the plain forwards that it needs.

It needs one forward that is captured, one without a mask, and one for every kind and k. Plain forwards, captured
and masked ones and the whole command take turns, in CPU time of one thread: other work slows all of them.

    python benchmarks/k_sweep.py hf:PATH --texts tests/fixtures/english_paragraphs.txt --samples 4 --k 8,32
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import semdiag
from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.inputs import read_batches
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.rules import Keep
from semdiag.questions.k_sweep.budgets import EXTERNAL_KINDS, masks_of
from semdiag.questions.k_sweep.measure import KSweepPlan


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def plain(loaded: LoadedModel, batch: Batch) -> None:
    with torch.no_grad():
        batching.call(loaded.module, batch)


def captured(loaded: LoadedModel, batch: Batch) -> None:
    semdiag.k_sweep(loaded, [batch])


def masked(loaded: LoadedModel, batch: Batch, keep: Keep) -> None:
    with semdiag.sparsify(loaded.module, keep=keep):
        plain(loaded, batch)


def whole(loaded: LoadedModel, batch: Batch, plan: KSweepPlan) -> None:
    semdiag.k_sweep(loaded, [batch], plan=plan)


def inputs(loaded: LoadedModel, texts: Path | None, samples: int, length: int) -> Batch:
    if texts is not None:
        return next(iter(batching.first_samples(read_batches(texts, loaded, samples), samples)))
    tokens = next(part.num_embeddings for part in loaded.module.modules() if isinstance(part, torch.nn.Embedding))
    return torch.randint(tokens, (samples, length), generator=torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path, help="default: random tokens")
    parser.add_argument("--length", type=int, default=127, help="of random tokens")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--k", default="8,32")
    parser.add_argument("--kinds", default=",".join(EXTERNAL_KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = semdiag.load(options.model)
    loaded.module.eval()
    batch = inputs(loaded, options.texts, options.samples, options.length)
    ks, kinds = tuple(map(int, options.k.split(","))), tuple(options.kinds.split(","))
    masks = masks_of(ks, 0, kinds)
    runs: dict[str, Callable[[], None]] = {"plain": partial(plain, loaded, batch)}
    runs["without --rerun, a forward"] = partial(captured, loaded, batch)
    runs |= {f"{name}, k = {k}": partial(masked, loaded, batch, keep) for name, k, keep in masks}
    needed = 2 + len(masks)
    command = f"k-sweep --rerun, {needed} forwards"
    runs[command] = partial(whole, loaded, batch, KSweepPlan(rerun=True, ks=ks, kinds=kinds))
    runs["plain"]()
    rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(options.rounds)]
    shape = tuple(batching.tensors_of(batch)[0].shape)
    print(f"torch {torch.__version__}, one thread, {options.model}, tokens {shape}")
    print("| what | s | of the forwards it needs, least to most |\n|---|---|---|")
    for name in runs:
        count = needed if name == command else 1
        ratios = sorted(each[name] / (count * each["plain"]) for each in rounds)
        least = min(each[name] for each in rounds)
        print(f"| {name} | {least:.2f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")


if __name__ == "__main__":
    main()
