"""Do greedy budgets hold on samples that did not choose them? See docs/commands/k-sweep.md#budgets.

    python benchmarks/budgets.py checkpoints/missing-duplicate-full-seed-153476998 250 8
    python benchmarks/budgets.py docs.causal_model:build 50 5

In several random orders of the samples, budgets are chosen on the first n, with and without the margin, and run on
all others: Σ k, and the mean change of the loss on both.
"""

import argparse
from collections.abc import Mapping, Sequence

import torch

import semdiag
from semdiag.capturing.batches import split
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import running
from semdiag.questions.k_sweep.budgets import NeededKeys, Place, greedy, rules
from semdiag.questions.k_sweep.rerun import mean_change, rerun

SAMPLES, TOLERANCE, MOST_RUNS = 2000, 0.01, 200


def samples_of(loaded: LoadedModel, most: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens and, where they are known, labels: what came with a model, or fresh samples of its task."""
    if loaded.external:
        return torch.cat(list(loaded.batches)), None
    tokens, labels, _ = loaded.default_inputs(samples=most, seed=0)
    return tokens, labels


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("n", type=int)
    parser.add_argument("orders", type=int)
    said = parser.parse_args()
    torch.set_num_threads(1)
    loaded = semdiag.load(said.model)
    tokens, labels = samples_of(loaded, SAMPLES)
    for order in range(said.orders):
        shuffled = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(order + 1))
        parts = shuffled[: said.n], shuffled[said.n :]
        needed = NeededKeys()
        with running(loaded, needed.add) as run:
            for batch in split(tokens[parts[0]], 500):
                run(batch)

        def changed(budget: Mapping[Place, Sequence[int]], part: torch.Tensor) -> tuple[float, float]:
            own = None if labels is None else labels[part]
            again = rerun(loaded, split(tokens[part], 500), own, [("budget", -1, rules(budget))])
            return mean_change(again, "budget", -1)

        def cost(budget: Mapping[Place, Sequence[int]], part: torch.Tensor = parts[0]) -> float:
            return changed(budget, part)[1]

        named = {
            f"margin {margin}": greedy(needed, cost, TOLERANCE, MOST_RUNS, margin=margin)
            for margin in (False, True)
        }
        named["weight-95"] = needed.smallest(0.95)
        for name, budget in named.items():
            if budget is None:
                print(f"order {order}, {name}: none")
                continue
            chosen, others = (changed(budget, part)[0] for part in parts)
            total = sum(map(sum, budget.values()))
            print(f"order {order}, {name}: total {total}, chosen on {chosen:.5f}, others {others:.5f}", flush=True)
