"""Runs of a model beside the one in float64: what a number format does, forecast and measured."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import FORMATS, NumberFormat
from semdiag.measuring.rounded_operations import (
    RoundedProducts,
    RoundedResults,
    converted,
    operands_alone,
    with_rounded_weights,
)
from semdiag_models.reading import require_memory

_FINEST = FORMATS["float16"]  # that is run to forecast: in finer formats too few choices change to be counted


@dataclass(frozen=True)
class Reading:
    """What a run says of a format.

    Attributes:
        kind: the format.
        column: ``forecast`` or ``measured``.
        weight: what a choice counts that differs from the one in float64.
    """

    kind: NumberFormat
    column: str
    weight: float = 1.0


@dataclass(frozen=True)
class RoundedRun:
    """A model that runs beside the one in float64.

    Attributes:
        model: that runs.
        inside: entered around each of its forward passes.
        readings: what it says.
    """

    model: LoadedModel
    inside: AbstractContextManager[object]
    readings: tuple[Reading, ...]


def rounded_runs(
    loaded: LoadedModel, formats: Sequence[NumberFormat], seed: int
) -> tuple[LoadedModel, list[RoundedRun]]:
    """Return a copy of a model in float64, and what runs beside it for each format.

    Measured: a copy of the model runs in a format of 16 bits or more. For one of 8 bits the model runs in float64,
    and the operands of its matrix products are rounded. Forecast: for a format of 16 bits or more the model runs
    in float64, with weights and every result rounded to it; float32 changes as many choices as float16, in
    proportion to their last places. For one of 8 bits weights are rounded, and all other operands of products move
    at random within half a last place.

    Source: docs/theory.md#propagated-rounding. Deviation: not in the paper.

    Args:
        loaded: the model.
        formats: float32 or coarser.
        seed: of what is drawn.

    Raises:
        InputError: if copies of the model do not fit into memory.
    """
    wide = [kind for kind in formats if not operands_alone(kind)]
    run_in = {kind: min(kind, _FINEST, key=lambda one: one.digits) for kind in wide}
    numbers = sum(values.numel() for values in loaded.module.parameters())
    in_float64 = 1 + len({*run_in.values()}) + len(formats) - len(wide)
    narrow = sum(getattr(torch, kind.name).itemsize for kind in wide)
    require_memory((8 * in_float64 + narrow) * numbers, "To forecast, for copies of the model")
    exact, runs = converted(loaded, torch.float64), []
    for kind in formats:
        measured = (Reading(kind, "measured"),)
        if not operands_alone(kind):
            runs.append(RoundedRun(converted(loaded, getattr(torch, kind.name)), nullcontext(), measured))
            continue
        products = RoundedProducts(kind, exact.module)
        drawn = products.drawing(torch.Generator().manual_seed(seed))
        runs += [RoundedRun(exact, products, measured), RoundedRun(exact, drawn, (Reading(kind, "forecast"),))]
    for own in dict.fromkeys(run_in.values()):
        read = [kind for kind in wide if run_in[kind] == own]
        readings = tuple(Reading(kind, "forecast", 2.0 ** (own.digits - kind.digits)) for kind in read)
        runs.append(RoundedRun(with_rounded_weights(exact, own), RoundedResults(own), readings))
    return exact, runs
