"""What a k-sweep sees of the clean pass over its inputs, its own or that of every command."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, split
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.call_lengths import longest_call
from semdiag.measuring.calls.query_draws import QueryDraws
from semdiag.questions.k_sweep.measure.budget_search import halves
from semdiag.questions.k_sweep.measure.quarters import packed
from semdiag.questions.k_sweep.measure.rerun import rerun_ks
from semdiag.questions.k_sweep.measure.top_scores import TopScores
from semdiag_models import InputError

if TYPE_CHECKING:
    from semdiag.questions.k_sweep.measure.probe import KSweepPlan

LARGEST_K = 48


@dataclass
class CleanPass:
    """Keeps the top scores of a clean pass, and how long it took."""

    batches: list[Batch]  # the inputs
    pieces: Mapping[int, Sequence[Batch]]  # of them, by length
    scores: TopScores  # that were seen
    seconds: float = 0.0  # of the pass

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Time the pass, and follow the stream of what runs."""
        started = time.perf_counter()
        with self.scores.streams.watched(module):
            yield
        self.seconds = time.perf_counter() - started

    def start(self, samples: int) -> None:
        """Start a batch with so many samples."""
        self.scores.samples.start(samples)

    def add(self, call: AttentionCall) -> None:
        """Keep the top scores of a call."""
        self.scores.add(call)


def clean_pass(
    loaded: LoadedModel,
    tokens: Batch | Iterable[Batch],
    plan: "KSweepPlan",
    batch_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
    min_keys: int,
    queries: int | None,
    seed: int,
) -> CleanPass:
    """Return what is to see a clean pass; arguments as of :func:`~.probe.k_sweep_tables`."""
    batches = split(tokens, batch_size)
    longest, keys = longest_call(loaded, batches, device, dtype)
    largest = _largest_k(plan, keys)
    if plan.budget:
        halves(batches)  # refused before minutes are spent
    if plan.lengths and not loaded.external:
        raise InputError("--lengths takes external models.")
    pieces = {n: packed(batches, n, max(1, batch_size * keys // n)) for n in plan.lengths}
    draws = QueryDraws(queries, seed)
    draws.expect(longest)
    run, every_k = plan.ks or tuple(rerun_ks(largest)), not loaded.external or plan.max_k is not None
    scores = TopScores(largest, draws, min_keys, every_k=every_k, own_keys=plan.rerun, run=run)
    return CleanPass(batches, pieces, scores)


def _largest_k(plan: "KSweepPlan", keys: int) -> int:
    most = max(keys, *plan.lengths, 2)
    if plan.ks and max(plan.ks) > most:
        raise InputError(f"k must lie in 1 … {most}, the most keys of a query here. Got k={max(plan.ks)}.")
    if plan.max_k is not None and plan.max_k >= max(keys, 2):
        raise InputError(
            f"The largest k must be below the number of keys, at most {keys} here: otherwise nothing is dropped. "
            f"Got {plan.max_k}."
        )
    largest = plan.max_k or max(1, min(LARGEST_K, keys - 1))
    return max(largest, min(max(plan.ks, default=1), keys - 1))  # what is run is measured, too
