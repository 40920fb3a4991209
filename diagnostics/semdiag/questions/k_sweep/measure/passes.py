"""Forward passes of a model without a mask and with each of several, here or in a process of their own."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.mask_rules import Keep
from semdiag.capturing.sparsify import sparsify
from semdiag.measuring.calls.random_numbers import RandomNumbers
from semdiag.measuring.calls.running import in_evaluation
from semdiag.questions.k_sweep.measure.answer_changes import output_change, position_terms
from semdiag.questions.k_sweep.measure.answers import Answers, Reader
from semdiag.questions.k_sweep.measure.quarters import QUARTERS, chunk_sums, quarter_sums
from semdiag_models import InputError

NO_MASK = "none"


@dataclass(frozen=True)
class RerunOrder:
    """What a rerun was asked, with some of the masks; a process can be sent it."""

    loaded: LoadedModel
    batches: Sequence[Batch]
    labels: Tensor | None
    numbered: Sequence[tuple[int, str, int, Keep]]  # number, name, k and rule of each mask
    optional: Sequence[str]
    device: torch.device | str | None
    dtype: torch.dtype | None
    plain: bool = True  # whether the rows without a mask are wanted
    state: Tensor | None = None  # of torch's generator at the start; None: as it is
    chunk: int = 0  # positions of the parts of which samples have a row each; 0: one row a sample


Place = tuple[int, int]  # of a batch, and of a mask in it; 0: none


@dataclass
class Passes:
    """What came of running a model with masks: rows of both tables, and what is to be remarked."""

    rows: dict[Place, list[dict[str, Any]]] = field(default_factory=dict)
    quarters: dict[Place, list[dict[str, Any]]] = field(default_factory=dict)
    refused: dict[str, tuple[Place, str]] = field(default_factory=dict)  # the first time, by name, and why
    padded: bool = False
    drew: bool = False
    reader: tuple[str, Sequence[str], str, str] | None = None  # its others, unread, reason and loss
    state: Tensor = field(default_factory=torch.get_rng_state)  # of torch's generator at the end


def carry_out(order: RerunOrder) -> Passes | str:
    """Carry out an order on one CPU thread, for a process of its own."""
    torch.set_num_threads(1)
    if order.state is not None:
        torch.set_rng_state(order.state)
    try:
        return passes(order, lambda samples: None)
    except InputError as error:
        return str(error)


def passes(order: RerunOrder, after_batch: Callable[[int], None]) -> Passes:
    """Run a model without a mask and with each of several."""
    loaded, labels, passes = order.loaded, order.labels, Passes()
    with in_evaluation(loaded, order.device, order.dtype) as (module, place, kind):

        def run(batch: Batch) -> Any:
            numbers.again()
            return batching.call(module, batch)

        def masked(batch: Batch, keep: Keep) -> tuple[Any, dict[str, float], set[int]]:
            with sparsify(module, keep) as mask:
                output = run(batch)
            kept, keys = mask.totals
            samples = batching.samples_of(batch)
            return output, {"kept": kept / samples, "keys": keys / samples}, mask.padded

        def add(at: Place, name: str, k: int, after: Answers, counts: dict[str, float]) -> None:
            quarters = passes.quarters.setdefault(at, [])
            passes.rows[at] = list(_rows(name, k, first, before, after, counts, order.chunk, quarters.append))

        first, reader = 0, None
        for number, given in enumerate(order.batches):
            numbers = RandomNumbers(place)
            batch, size = batching.moved(given, place, kind), batching.samples_of(given)
            own = None if labels is None else labels[first : first + size]
            try:
                if reader is None:
                    reader = Reader(module, batch, labels, run)
                    before, reader.output = reader.read(reader.output, batch, own), None
                else:
                    before = reader.read(run(batch), batch, own)
                plain = loaded.external and bool(before.counted.all())
                passes.drew = passes.drew or numbers.drawn
                if order.plain:
                    add((number, 0), NO_MASK, 0, before, {})
                after_batch(size)
                for mask, name, k, keep in order.numbered:
                    if name in passes.refused:
                        continue
                    try:
                        output, counts, lengths = masked(batch, keep)
                    except InputError as error:
                        if name not in order.optional:
                            raise
                        passes.refused[name] = (number, mask), str(error)
                        continue
                    passes.padded = passes.padded or (plain and before.counted.shape[1] in lengths)
                    after = reader.read(output, batch, own)
                    after_batch(size)
                    add((number, mask), name, k, after, counts)
            except InputError:
                raise
            except Exception as error:  # whatever the model raises
                message = " ".join(str(error).split())[:200]
                raise InputError(
                    f"{loaded.path} cannot be run with a mask ({type(error).__name__}: {message})."
                ) from error
            first += size
    passes.reader = None if reader is None else (reader.others, reader.unread, reader.reason, reader.loss)
    passes.state = torch.get_rng_state()
    return passes


def _rows(
    mask: str,
    k: int,
    first: int,
    before: Answers,
    after: Answers,
    counts: dict[str, float],
    chunk: int,
    quarters: Callable[[dict[str, Any]], None],
) -> Iterator[dict[str, Any]]:
    """Yield a row per sample, or per part of one; those of its quarters are handed out."""
    counted, terms = before.counted, position_terms(before, after)
    chunk *= before.distribution
    parts, sums = chunk_sums(counted, terms, chunk)
    changes, listed = output_change(before, after).tolist(), {name: x.tolist() for name, x in sums.items()}
    counts = {"kept": math.nan, "keys": math.nan} | counts
    for at, many in enumerate(parts.tolist()):
        place = {"mask": mask, "k": k, "sample": first + at, "chunk": chunk, "classes": before.classes}
        place |= {"output_change": changes[at]} | {name: count / many for name, count in counts.items()}
        for part in range(many):
            yield {**place, "part": part, **{name: x[at][part] for name, x in listed.items()}}
    if not before.distribution:
        return
    parts = {name: terms[name] for name in ("targets", "predictions", "loss", "divergence")}
    shares = {name: count / QUARTERS for name, count in counts.items()}
    for quarter, at, own in quarter_sums(counted, parts):
        quarters({"mask": mask, "k": k, "sample": first + at, "quarter": quarter, **shares, **own})
