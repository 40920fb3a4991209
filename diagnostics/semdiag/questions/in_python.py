"""One probe asked of one model and its inputs, in Python: measurements, like those of measure()."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
    model: Model, batches: Batches, labels: Tensor | None = None, plan: KSweepPlan | None = None, **keywords: Any
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
        keywords: fields of the plan, in its place, as ``rerun=True, ks=[8, 16]``; and ``batch_size`` (100),
            ``device`` (the model's), ``dtype`` (float64 of encoders of semdiag_models, as the commands; of others
            the model's), ``seed`` (0), ``queries`` (None: all; else how many are drawn per sample and head).

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
    return _probed(model, batches, labels, KSweepPlan, plan, keywords)


def mask_stability(
    model: Model, batches: Batches, labels: Tensor | None = None, plan: NoisePlan | None = None, **keywords: Any
) -> Measurements:
    """Compare the mask of every query with the masks of noisy copies of the same input.

    The plan says levels, draws, place and seed of the noise; ``labels``, (N,) classes, are for the accuracy. All
    else, and what is refused, is as in :func:`k_sweep`.

    Source: docs/theory.md#mask-stability. Deviation: not in the paper.

    Returns:
        Measurements with the tables ``masks`` and ``noise_effects``.
    """
    return _probed(model, batches, labels, NoisePlan, plan, keywords)


def mask_precision(
    model: Model, batches: Batches, plan: PrecisionPlan | None = None, **keywords: Any
) -> Measurements:
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
    return _probed(model, batches, None, PrecisionPlan, plan, keywords)


def compare(
    base: Model, model: Model, batches: Batches, *, top: int = ComparePlan.top, **keywords: Any
) -> Measurements:
    """Run two models on the same inputs and compare their attention, head by head, and their outputs.

    Source: docs/commands/models.md. Deviation: not in the paper.

    Args:
        base: A model from :func:`semdiag.load`, or any module.
        model: what was made of it, likewise; with as many attention calls of the same sizes.
        batches: what both are called with, as of :func:`~semdiag.measuring.measure.measure`.
        top: k of the top-k whose overlap is asked for.
        keywords: like those of :func:`k_sweep`. The base runs in a precision of its own.

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
    return _measured(model, batches, None, plan, _settings(plan, {"batch_size": 8, **keywords}))


def landscape(
    model: LoadedModel | Encoder,
    batches: Batches,
    labels: Tensor,
    plan: LandscapePlan | None = None,
    **keywords: Any,
) -> Measurements:
    """Evaluate the loss on every cell of planes through a checkpoint.

    Of an encoder, token ids (N, L) and classes (N,); the plan says planes, size and resolution. All else, and what
    is refused, is as in :func:`k_sweep`.

    Source: docs/theory.md#empirical. Deviation: the directions of a random plane are orthogonal tensor by tensor.

    Returns:
        Measurements with the table ``landscape``.
    """
    return _probed(model, batches, labels, LandscapePlan, plan, keywords)


def lipschitz(
    model: LoadedModel | Encoder,
    batches: Batches,
    labels: Tensor,
    plan: LipschitzPlan | None = None,
    **keywords: Any,
) -> Measurements:
    """Estimate from below how steep the loss is in the parameters, and each block in its input; in float64.

    Of an encoder, the first ``plan.samples`` token ids (N, L) and classes (N,); the plan says how much is drawn,
    and how far. All else, and what is refused, is as in :func:`k_sweep`.

    Source: docs/theory.md#empirical. Deviation: see each part.

    Returns:
        Measurements with the tables ``loss_secants``, ``loss_gradients`` and ``jacobians``.
    """
    return _probed(model, batches, labels, LipschitzPlan, plan, keywords)


@dataclass(frozen=True)
class _Settings:
    """Keywords that every probe takes."""

    batch_size: int = 100
    device: torch.device | str | None = None  # None: the model's
    dtype: torch.dtype | None = None  # None: float64 of encoders, of others the model's
    seed: int = 0
    queries: int | None = None  # number drawn per sample and head; None: all


def _probed(
    model: Model, batches: Batches, labels: Tensor | None, kind: type[Any], plan: Any, keywords: dict[str, Any]
) -> Measurements:
    """Measure what a plan asks, or one made from keywords that are its fields."""
    in_plan = {field.name for field in fields(kind)} & keywords.keys() - {"seed"}
    if in_plan and plan is not None:
        raise InputError(f"{', '.join(sorted(in_plan))}: say it in the plan, or leave out the plan.")
    if plan is None:
        values = {name: keywords[name] for name in in_plan}
        plan = kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})
    rest = {name: value for name, value in keywords.items() if name not in in_plan}
    return _measured(model, batches, labels, plan, _settings(plan, rest))


def _settings(plan: Any, keywords: dict[str, Any]) -> _Settings:
    """Check the plan and the keywords beside it."""
    if not isinstance(plan, Plan):
        classes = ", ".join(sorted(kind.__name__ for kind in plans()))
        raise InputError(f"A plan is one of {classes}. Got {plan!r}.")
    for name in keywords:
        if name not in _Settings.__dataclass_fields__:
            kind = type(plan).__name__
            of_plan = ", ".join(field.name for field in fields(plan))  # type: ignore[arg-type]
            raise TypeError(
                f"There is no argument {name!r}, but batch_size, device, dtype, seed, queries, and those of "
                f"{kind}: {of_plan}."
            )
    return _Settings(**keywords)


def _measured(
    model: Model, batches: Batches, labels: Tensor | None, plan: Plan, settings: _Settings
) -> Measurements:
    loaded = unnamed(model)
    _check(loaded, labels, plan, settings)
    parts: Sequence[Batch] = batching.split(batches, settings.batch_size)
    home, model_dtype = home_of(loaded.module)
    device = settings.device
    place = torch.device(device) if device is not None else home
    dtype = settings.dtype
    if dtype is None and not loaded.external:
        dtype = DTYPES[Conditions().decided([loaded], place).dtype]
    seed = settings.seed
    queries = settings.queries

    def run(parts: list[Batch], size: int) -> tuple[Measurements, Subject, Mapping[str, pd.DataFrame]]:
        subject = Subject(loaded, parts, labels, seed, size, place, dtype or model_dtype, queries)
        if dtype is not None or not converted(loaded.module, model_dtype):  # else the probe runs another model
            subject.watch(plan)
        measured = measure(
            loaded,
            parts,
            labels=None if loaded.external else labels,
            batch_size=size,
            device=device,
            dtype=dtype,
            queries=queries,
            seed=seed,
            watchers=[*subject.watchers.values()],
        )
        return measured, subject, plan.measure(subject)

    try:
        measured, subject, tables = halving(run, list(parts), settings.batch_size)
    except NotAvailableError as reason:
        raise InputError(f"{plan.name} of {loaded.path} not available, because {reason}.") from None
    samples = int(measured.models["samples"].max())
    provenance = {**measured.provenance, "seed": seed, "samples": samples, **plan.provenance(samples, samples)}
    remarks = pd.concat([measured.remarks, subject.remarks], ignore_index=True)
    return measured.replace(provenance, remarks=remarks, **tables)


def _check(loaded: LoadedModel, labels: Tensor | None, plan: Plan, settings: _Settings) -> None:
    """Refuse what a plan cannot measure of a model."""
    refuse_masked(loaded.module, f"of which {plan.name} asks")
    as_whole_number(settings.batch_size, "batch_size", 1)
    as_whole_number(settings.seed, "seed", 0)
    if settings.queries is not None and not plan.takes_drawn_queries:
        raise InputError(f"{plan.name} needs every query: leave out queries.")
    if labels is None or not loaded.external:
        return
    remedy = ""
    if isinstance(plan, KSweepPlan):
        if plan.reruns(external=True):
            return
        remedy = " To run it with masks: rerun=True."
    raise InputError(f"labels are not read: {plan.name} compares no output of {loaded.path} with them.{remedy}")
