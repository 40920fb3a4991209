"""Cost of a landscape, as multiples of the plain forward passes it needs.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/landscape.py --threads 1

Pieces of the landscape (a few cells) and the same number of plain forward passes over the same samples, in the
same batches, alternate, so both see the same load of the machine; CPU time is compared, which waiting for other
processes does not enter. 25 × 25 cells cost 625 times what one cell costs: nothing is set up per grid but a plane.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from semdiag.questions.landscape.measure import LandscapePlan, landscape_table
from semdiag_models import Encoder, ModelConfig

LENGTH, SAMPLES, CELLS = 40, 500, 9


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of a piece of work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def encoder_of(attention: str) -> Encoder:
    """The architecture of the reference checkpoints, untrained."""
    config = ModelConfig(
        vocabulary_size=3, classes=2, length=LENGTH, attention=attention, k=5 if attention == "topk" else None
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(config).eval()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(0, 2, (SAMPLES,), generator=generator)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), load {os.getloadavg()[0]:.1f}")
    for attention in ("full", "topk"):
        encoder = encoder_of(attention)

        @torch.inference_mode()
        def plain(model: Encoder = encoder) -> None:
            for _ in range(CELLS + 1):  # the checkpoint is evaluated by itself as well
                logits = torch.cat([model(batch) for batch in torch.split(tokens, 250)])
                float(F.cross_entropy(logits, labels))

        def cells(model: Encoder = encoder) -> None:
            landscape_table(model, tokens, labels, plan=LandscapePlan(grid=3))

        plain(), cells()
        pairs = [(cpu_seconds(cells), cpu_seconds(plain)) for _ in range(arguments.rounds)]
        ratio = statistics.median(one / other for one, other in pairs)
        each = 1000 * statistics.median(one for one, _ in pairs) / (CELLS + 1)
        print(
            f"{attention}: {SAMPLES} samples, {each:.0f} ms per cell, {ratio:.2f} times the plain forward passes"
        )


if __name__ == "__main__":
    main()
