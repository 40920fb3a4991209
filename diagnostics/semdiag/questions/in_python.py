"""One probe asked of one model and its inputs, in Python: measurements, like those of measure()."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch, as_whole_number
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.memory import halving
from semdiag.measuring.calls.running import converted, home_of, refuse_masked, unnamed
from semdiag.measuring.measure import DTYPES, Conditions, measure
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.plan import Plan
from semdiag.measuring.subject import Subject
from semdiag.questions.compare import ComparePlan
from semdiag.questions.k_sweep import KSweepPlan
from semdiag.questions.landscape import LandscapePlan
from semdiag.questions.lipschitz import LipschitzPlan
from semdiag.questions.mask_precision import PrecisionPlan
from semdiag.questions.mask_stability import NoisePlan
from semdiag.questions.registry import plans
from semdiag_files import InputError
from semdiag_models import Encoder

Model = LoadedModel | nn.Module
Batches = Batch | Iterable[Batch]


def k_sweep(
    model: Model, batches: Batches, labels: Tensor | None = None, plan: KSweepPlan | None = None, **how: Any
) -> Measurements:
    """Ask of one model's scores, for many k at once, what top-k attention would make of them.

    A comparison within the model: nothing is trained anew, and the model is not changed. Where it is run again,
    masks keep some of the keys that its own mask keeps, and everything is over these; else over all its scores.

    Source: docs/theory.md#k-sweep. Deviation: not in the paper, which compares trained models.

    Args:
        model: A model from :func:`semdiag.load`, or any module; an encoder needs full or top-k attention.
        batches: what the model is called with, as of :func:`~semdiag.measuring.measure.measure`.
        labels: (N,) classes, for the loss of reruns; None: what the batches say (``labels``), else the next token
            of a causal language model.
        plan: the largest k; whether the model is run again with real masks.
        how: fields of the plan, in its place, as ``rerun=True, ks=[8, 16]``; and ``batch_size`` (100), ``device``
            (the model's), ``dtype`` (float64 of encoders of semdiag_models, as the commands; of others the
            model's), ``seed`` (0), ``queries`` (None: all; else how many are drawn per sample and head).

    Returns:
        Measurements with the table ``sweep``, and those of reruns. A row of ``sweep`` per k (0: all keys), layer
        and head (ALL, -1: pooled) and quantity: dispersion δ_h(k), ratio δ_h(k)/δ_s, separation Δ_h(k),
        weight_kept (attention weight of the k largest scores; all of queries with more than k keys, the others are
        counted as undefined), weight_kept_without_first (without the first key on both sides), head_change and, of
        our encoders, stream_change (docs/theory.md#truncation; at some k), load, ln_sound and ln_paper (ξ of the
        mask).

    Raises:
        InputError: if it cannot be measured of this model or these inputs.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> found = k_sweep(encoder, torch.tensor([[0, 1, 1, 0]]))
        >>> sorted(set(found.sweep["k"]))
        [0, 1, 2, 3]
    """
    return _asked(model, batches, labels, _plan(KSweepPlan, plan, how), **how)


def mask_stability(
    model: Model, batches: Batches, labels: Tensor | None = None, plan: NoisePlan | None = None, **how: Any
) -> Measurements:
    """Compare the mask of every query with the masks of noisy copies of the same input.

    The plan says levels, draws, place and seed of the noise; ``labels``, (N,) classes, are for the accuracy. All
    else, and what is refused, is as in :func:`k_sweep`.

    Source: docs/theory.md#mask-stability. Deviation: not in the paper.

    Returns:
        Measurements with the tables ``masks`` and ``noise_effects``.
    """
    return _asked(model, batches, labels, _plan(NoisePlan, plan, how), **how)


def mask_precision(model: Model, batches: Batches, plan: PrecisionPlan | None = None, **how: Any) -> Measurements:
    """Compare the mask of every query in float64 with those of number formats.

    The plan says the formats, and k of a model without a mask. All else, and what is refused, is as in
    :func:`k_sweep`.

    Source: docs/theory.md#rounded-operands. Deviation: not in the paper.

    Returns:
        Measurements with the tables ``rounded_masks`` and ``lost_weights``.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, attention="topk", k=2, blocks=1))
        >>> found = mask_precision(encoder, torch.tensor([[0, 1, 1, 0]]), formats=("bf16",))
        >>> found.rounded_masks["queries"].tolist()
        [4]
    """
    return _asked(model, batches, None, _plan(PrecisionPlan, plan, how), **how)


def compare(
    base: Model, model: Model, batches: Batches, *, top: int = ComparePlan.top, **how: Any
) -> Measurements:
    """Run two models on the same inputs and compare their attention, head by head, and their outputs.

    Source: docs/commands/models.md. Deviation: not in the paper.

    Args:
        base: A model from :func:`semdiag.load`, or any module.
        model: what was made of it, likewise; with as many attention calls of the same sizes.
        batches: what both are called with, as of :func:`~semdiag.measuring.measure.measure`.
        top: k of the top-k whose overlap is asked for.
        how: Keywords, like those of :func:`k_sweep`. The base runs in a precision of its own.

    Returns:
        Measurements of the model, with the tables ``compared`` and ``compared_outputs``.

    Raises:
        InputError: if the two cannot be compared, or not on these inputs.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> compare(encoder, encoder, torch.tensor([[0, 1, 1, 0]])).compared["total_variation"].tolist()
        [0.0]
    """
    first = base if isinstance(base, LoadedModel) else replace(unnamed(base), path="base")
    plan = ComparePlan(top, first, home_of(first.module)[1] if first.external else None)
    return _asked(model, batches, None, plan, **{"batch_size": 8, **how})


def landscape(
    model: LoadedModel | Encoder, batches: Batches, labels: Tensor, plan: LandscapePlan | None = None, **how: Any
) -> Measurements:
    """Evaluate the loss on every cell of planes through a checkpoint.

    Of an encoder, token ids (N, L) and classes (N,); the plan says planes, size and resolution. All else, and what
    is refused, is as in :func:`k_sweep`.

    Source: docs/theory.md#empirical. Deviation: the directions of a random plane are orthogonal tensor by tensor.

    Returns:
        Measurements with the table ``landscape``.
    """
    return _asked(model, batches, labels, _plan(LandscapePlan, plan, how), **how)


def lipschitz(
    model: LoadedModel | Encoder, batches: Batches, labels: Tensor, plan: LipschitzPlan | None = None, **how: Any
) -> Measurements:
    """Estimate from below how steep the loss is in the parameters, and each block in its input; in float64.

    Of an encoder, the first ``plan.samples`` token ids (N, L) and classes (N,); the plan says how much is drawn,
    and how far. All else, and what is refused, is as in :func:`k_sweep`.

    Source: docs/theory.md#empirical. Deviation: see each part.

    Returns:
        Measurements with the tables ``loss_secants``, ``loss_gradients`` and ``jacobians``.
    """
    return _asked(model, batches, labels, _plan(LipschitzPlan, plan, how), **how)


def _plan(kind: type[Any], plan: Any, how: dict[str, Any]) -> Any:
    """Return the plan, or one made from options that are its fields; these are removed from ``how``."""
    named = {field.name for field in fields(kind)} & how.keys() - {"seed"}
    if not named:
        return kind() if plan is None else plan
    if plan is not None:
        raise InputError(f"{', '.join(sorted(named))}: say it in the plan, or leave out the plan.")
    given = {name: how.pop(name) for name in named}
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in given.items()})


def _asked(
    model: Model,
    batches: Batches,
    labels: Tensor | None,
    plan: Any,
    *,
    batch_size: int = 100,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    queries: int | None = None,
    **unknown: Any,
) -> Measurements:
    loaded = unnamed(model)
    if not isinstance(plan, Plan):
        known_plans = ", ".join(sorted(kind.__name__ for kind in plans()))
        raise InputError(f"A plan is one of {known_plans}. Got {plan!r}.")
    for name in unknown:
        kind = type(plan).__name__
        of_plan = ", ".join(field.name for field in fields(plan))  # type: ignore[arg-type]
        raise TypeError(
            f"There is no argument {name!r}, but batch_size, device, dtype, seed, queries, and those of {kind}: "
            f"{of_plan}."
        )
    refuse_masked(loaded.module, f"of which {plan.name} asks")
    as_whole_number(batch_size, "batch_size", 1)
    as_whole_number(seed, "seed", 0)
    if queries is not None and not plan.takes_drawn_queries:
        raise InputError(f"{plan.name} needs every query: leave out queries.")
    cut: Sequence[Batch] = batching.split(batches, batch_size)
    home, own = home_of(loaded.module)
    place = torch.device(device) if device is not None else home
    if dtype is None and not loaded.external:
        dtype = DTYPES[Conditions().decided([loaded], place).dtype]
    compared = isinstance(plan, KSweepPlan) and plan.reruns(loaded.external)
    if labels is not None and loaded.external and not compared:
        how = " To run it with masks: rerun=True." if isinstance(plan, KSweepPlan) else ""
        raise InputError(f"labels are not read: {plan.name} compares no output of {loaded.path} with them.{how}")
    own_labels = None if loaded.external else labels

    def run(cut: list[Batch], size: int) -> tuple[Measurements, Subject, Mapping[str, pd.DataFrame]]:
        subject = Subject(loaded, cut, labels, seed, size, place, dtype or own, queries)
        if dtype is not None or not converted(loaded.module, own):  # else the probe runs another model
            subject.watch(plan)
        measured = measure(
            loaded, cut, labels=own_labels, batch_size=size, device=device, dtype=dtype, queries=queries,
            seed=seed, watchers=[*subject.watchers.values()],
        )  # fmt: skip
        return measured, subject, plan.measure(subject)

    try:
        measured, subject, tables = halving(run, list(cut), batch_size)
    except NotAvailableError as reason:
        raise InputError(f"{plan.name} of {loaded.path} not available, because {reason}.") from None
    samples = int(measured.models["samples"].max())
    known = {"seed": seed, "samples": samples, **plan.provenance(samples, samples)}
    remarks = pd.concat([measured.remarks, subject.remarks], ignore_index=True)
    return measured.replace({**measured.provenance, **known}, remarks=remarks, **tables)
