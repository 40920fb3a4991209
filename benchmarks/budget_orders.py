"""What ranks heads better where a budget search starts: the weight kept, or how far truncation moves the stream?

    python benchmarks/budget_orders.py checkpoints/missing-duplicate-full-seed-153476998 200 500
    python benchmarks/budget_orders.py docs.causal_model:build 24 25

Of n samples both orders make budgets by layer and head with the same Σ k: by weight, the k that keeps a share of
it for 95% of a head's queries; by Δ head and Δ stream, the smallest k of each head from which on truncation moves
its output, or the stream through W_o, by no more than a limit on average. All are run on m other samples: Σ k, and
the mean change of the loss. W_o is known of the models that benchmarks/truncation.py names.
"""

import argparse
from contextlib import ExitStack

import pandas as pd
import torch
from budgets import samples_of
from truncation import blocks_of

import semdiag
from semdiag.capturing.attention_calls import AttentionCall
from semdiag.capturing.batches import split
from semdiag.measuring.calls.query_draws import QueryDraws
from semdiag.measuring.calls.running import running
from semdiag.questions.k_sweep.measure.key_budgets import LEVELS, NeededKeys, Place, rules
from semdiag.questions.k_sweep.measure.rerun import mean_change, rerun
from semdiag.questions.k_sweep.measure.top_scores import TopScores

Budget = dict[Place, list[int]]


def total(budget: Budget) -> int:
    return sum(map(sum, budget.values()))


def within(changes: pd.DataFrame, layers: dict[Place, int], limit: float) -> Budget:
    """The smallest k of each head from which on its change (row: layer, head; column: k) is within a limit."""
    above = (changes > limit) * changes.columns.to_numpy()
    return {place: (above.loc[layer].max(axis=1) + 1).tolist() for place, layer in layers.items()}


def as_many(changes: pd.DataFrame, layers: dict[Place, int], keys: int) -> Budget:
    """The largest budget by changes with no more keys than that."""
    limits = sorted({value for value in changes.to_numpy().ravel().tolist() if value == value}, reverse=True)
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = total(within(changes, layers, limits[middle])) <= keys
        low, high = (middle, high) if fits else (low, middle - 1)
    return within(changes, layers, limits[low])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("n", type=int)
    parser.add_argument("m", type=int)
    said = parser.parse_args()
    torch.set_num_threads(1)
    loaded = semdiag.load(said.model)
    tokens, labels = samples_of(loaded, said.n + said.m)
    shuffled = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))
    first, others = shuffled[: said.n], shuffled[said.n : said.n + said.m]
    largest = tokens.shape[1] - 1
    needed, top = NeededKeys(), TopScores(largest, QueryDraws(None, 0), run=tuple(range(1, largest + 1)))

    def add(call: AttentionCall) -> None:
        needed.add(call)
        top.add(call)

    with ExitStack() as stack:
        run = stack.enter_context(running(loaded, add))
        stack.enter_context(top.streams.followed(blocks_of(run.module)))
        for batch in split(tokens[first], 250):
            top.samples.start(len(batch))
            run(batch)
    swept = top.table().query("layer >= 0")
    changes = {
        name: swept[swept["quantity"] == quantity].pivot(index=["layer", "head"], columns="k", values="mean")
        for name, quantity in (("Δ head", "head_change"), ("Δ stream", "stream_change"))
    }

    def changed(budget: Budget) -> str:
        own = None if labels is None else labels[others]
        again = rerun(loaded, split(tokens[others], 250), own, [("budget", -1, rules(budget))])
        return f"{total(budget)}: {mean_change(again, 'budget', -1)[1]:.4f}"

    print(f"| weight kept | by weight | {' | '.join(changes)} |\n|---|---|---|---|")
    for level in LEVELS:
        by_weight = needed.smallest(level)
        rest = [as_many(rows, needed.layers, total(by_weight)) for rows in changes.values()]
        print(f"| {level} | {' | '.join(map(changed, (by_weight, *rest)))} |", flush=True)


if __name__ == "__main__":
    main()
