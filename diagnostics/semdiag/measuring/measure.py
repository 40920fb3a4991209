"""Run a model over inputs, and reduce its attention to measurements under given conditions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_call import APPROXIMATE, AttentionCall
from semdiag.capturing.audit import Audit, Remark
from semdiag.capturing.batches import Batch, as_whole_number, as_whole_numbers, checked_real
from semdiag.capturing.inputs import AS_THEY_ARE, TextOptions
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.padding import NOT_APPLIED, NOT_APPLIED_CODE
from semdiag.mathematics.censored import NO_CLASS, predicted_classes
from semdiag.measuring.calls import collector
from semdiag.measuring.calls.capture import longest_call
from semdiag.measuring.calls.collector import LEAST_MAX_QUERIES, MAX_QUERIES, Collector, QueryDraws
from semdiag.measuring.calls.running import ModelRun, running, unnamed
from semdiag.measuring.encoders.traces import checked_batch, checked_tokens, fitting
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.plan import Plan
from semdiag.measuring.reach import cannot_represent
from semdiag.measuring.subject import Watcher
from semdiag.measuring.table import OUT_OF_REACH, OUT_OF_REACH_CODE, RESIDUALS, typed
from semdiag.measuring.training_runs import setting_in_words
from semdiag.measuring.words import counted
from semdiag_files import InputError
from semdiag_models import TASKS, Encoder
from semdiag_models.train import find_device


def measure(
    model: LoadedModel | nn.Module,
    batches: Batch | Iterable[Batch],
    *,
    labels: Tensor | None = None,
    queries: int | None = None,
    real: Tensor | None = None,
    inputs: str = "given by the user",
    k: int | Sequence[int] = (),
    batch_size: int = 100,
    samples: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    min_keys: int = 1,
    max_queries: int = MAX_QUERIES,
    after_batch: Callable[[int], None] = lambda samples: None,
    watchers: Sequence[Watcher] = (),
) -> Measurements:
    """Measure dispersion, separation and key load of every query of every attention layer, of any model.

    The model is not changed: it runs without gradients in evaluation mode, as a copy if moved or converted.

    Args:
        model: model from :func:`semdiag.load`, or any module of your own.
        batches: inputs of the model: a tensor, a dictionary of keyword arguments or a tuple of positional ones; or
            an iterable of them, which is read one batch at a time. One tensor or dictionary is cut into batches.
        labels: (N,) classes, for the accuracy of semdiag's own models; refused for others.
        queries: number of queries drawn per sample and head of the longest sequence (of an iterator, in the first
            batch), and the same fraction of all others. None means all. Every query has the same probability, so
            plain means and percentiles are estimates. Extremes and key loads are over the drawn queries.
        real: (N, L) bool over all samples, false for padding; padded queries are left out. By default it is read
            from the usual arguments (``attention_mask``, ``key_padding_mask``, …).
        inputs: origin of the inputs, for the report.
        k: counterfactual number of heavy hitters, or several (those above the number of keys are left out).
        batch_size: number of samples at a time, if ``batches`` is one tensor or dictionary.
        samples: number of first samples to measure; no batch after them is read. None means all.
        device: device on which to run; None means the model's.
        dtype: dtype in which the model runs and scores are computed, float32 or float64; None means the model's.
        seed: random seed for the drawn queries.
        min_keys: smallest number of keys of a query that counts.
        max_queries: largest number of rows in the tables of queries and of loads. Beyond it, a sample of the rows
            is kept, and the table ``sketches`` has exact counts, means and extremes, and close percentiles.
        after_batch: called with the number of samples of each finished batch.
        watchers: further consumers of the attention calls.

    Returns:
        Measurements of this one model.

    Raises:
        InputError: if an argument is invalid, ``real`` fits no attention, there is no query with enough keys, the
            model cannot run on the inputs or has no attention that can be captured, or no k is in 1 … length.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> measure(encoder, torch.tensor([[0, 1, 1, 0]])).queries[["layer", "query", "keys"]].values.tolist()
        [[0, 0, 4], [0, 1, 4], [0, 2, 4], [0, 3, 4]]
    """
    loaded = unnamed(model)
    if labels is not None and loaded.external:
        raise InputError(
            f"labels cannot be used here: only the attention of {loaded.path} is measured. To compare outputs "
            "with labels, use semdiag.k_sweep(model, batches, labels, rerun=True)."
        )
    real = checked_real(real)
    ks = _checked(k, dtype, batch_size=batch_size, samples=samples, min_keys=min_keys, max_queries=max_queries)
    as_whole_number(seed, "seed", 0)
    if device is not None:
        find_device(str(device).partition(":")[0])  # refuses a device that is not available
    if loaded.external and any(value < 1 for value in ks):
        raise InputError(f"k must be at least 1. Got k={min(ks)}.")
    if samples is not None and labels is not None:
        labels = labels[:samples]
    cut = _checked_batches(loaded, batches, batch_size, samples, labels, real, ks)
    draws = QueryDraws(queries, seed)
    if queries is not None:
        first, cut = _looked_ahead(cut)
        draws.expect(longest_call(loaded, first, device, dtype)[0])
    collected = Collector(loaded.path, ks, draws, _own_k(loaded), min_keys, max_queries)
    run, classes = _run(loaded, cut, collected, watchers, device, dtype, real, after_batch)
    collected.arrivals.settle()
    _check_samples(collected.samples, labels)
    _check_real(real, collected.samples, samples)
    _check_collected(loaded.path, collected, run, real)
    fits = fitting(ks, int(collected.layers.largest("longest")), "the largest number of keys") if ks else []
    _add_remarks(run.audit, loaded, draws, set(ks) - set(fits))
    tables = collected.tables(fits)
    _check_keys(loaded.path, tables["queries"], min_keys, draws)
    accuracy = None if classes is None else _accuracy(classes, labels, run.audit)
    return Measurements(
        models=_model_row(loaded, collected, draws, run.audit, {"inputs": inputs, "accuracy": accuracy}),
        history=pd.DataFrame({"model": loaded.path, "epoch": [], **loaded.history}),
        remarks=collector.remarks_table(loaded.path, run.audit),
        skipped=collector.skipped_table(loaded.path, run.audit, collected.layers.modules),
        provenance=_provenance(run, queries, min_keys),
        **tables,
    )


def _checked_batches(
    loaded: LoadedModel,
    batches: Batch | Iterable[Batch],
    batch_size: int,
    samples: int | None,
    labels: Tensor | None,
    real: Tensor | None,
    ks: Sequence[int],
) -> Iterable[Batch]:
    """Return the batches to run: a list of which all is checked, or an iterator that is checked as it is read."""
    cut: Iterable[Batch] = batching.each(batches, batch_size)
    if samples is not None:
        cut = batching.first_samples(cut, samples)
    if not isinstance(batches, Tensor | Mapping | Sequence):
        return map(partial(checked_batch, loaded.module), cut) if isinstance(loaded.module, Encoder) else cut
    listed = list(cut)
    count = sum(map(batching.samples_of, listed))
    _check_samples(count, labels)
    _check_real(real, count, samples)
    return checked_tokens(loaded.module, listed, ks) if isinstance(loaded.module, Encoder) else listed


def _looked_ahead(cut: Iterable[Batch]) -> tuple[list[Batch], Iterable[Batch]]:
    """Return all batches of a list, or the first of an iterator; and all batches."""
    if isinstance(cut, list):
        return cut, cut
    iterator = iter(cut)
    first = list(islice(iterator, 1))
    return first, chain(first, iterator)


def _own_k(loaded: LoadedModel) -> int | None:
    """Return the k of an encoder whose approximation may keep another number of keys."""
    config = loaded.module.config if isinstance(loaded.module, Encoder) else None
    return config.k if config is not None and config.attention in APPROXIMATE else None


def _run(
    loaded: LoadedModel,
    batches: Iterable[Batch],
    collected: Collector,
    watchers: Sequence[Watcher],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    real: Tensor | None,
    after_batch: Callable[[int], None],
) -> tuple[ModelRun, Tensor | None]:
    """Run a model on batches, seen by collector and watchers; return the classes that an encoder predicts."""
    consumers: list[Collector | Watcher] = [collected, *watchers]

    def add(call: AttentionCall) -> None:
        for consumer in consumers:
            consumer.add(call)

    answers = []  # classes only: logits of long texts are large
    with running(loaded, add, device, dtype, real) as run, ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher.watched(run.module))
        for batch in batches:
            for consumer in consumers:
                consumer.start(batching.samples_of(batch))
            _check_real(real, collected.samples, 0)  # more may follow
            output = run(batch)
            if not loaded.external:  # the output of another model is unknown
                answers.append(predicted_classes(output).cpu())
            del output  # it may be large
            after_batch(batching.samples_of(batch))
    return run, torch.cat(answers) if answers else None


def _check_collected(path: str, collected: Collector, run: ModelRun, real: Tensor | None) -> None:
    """Refuse a model of which no attention or no query was captured, and ``real`` that fits none."""
    if not len(collected.layers):
        raise no_attention(path, run.audit)
    if not sum(collected.counted.values()):
        raise InputError("There is no query to measure: all input tokens are padding.")
    if real is not None and not run.padding.fitted:
        reason = min(remark.text for remark in run.audit.remarks if remark.code == NOT_APPLIED_CODE)
        raise InputError(f"real fits no attention of {path}: {reason.removeprefix(NOT_APPLIED + ': ')}.")


def _checked(k: Any, dtype: Any, **numbers: Any) -> tuple[int, ...]:
    for name, value in numbers.items():
        if value is not None or name != "samples":
            as_whole_number(value, name, LEAST_MAX_QUERIES if name == "max_queries" else 1)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"dtype must be torch.float32 or torch.float64. Got {dtype!r}.")
    return as_whole_numbers(k, "k")


def _add_remarks(audit: Audit, loaded: LoadedModel, draws: QueryDraws, left_out: set[int]) -> None:
    texts = [(text, "queries-drawn") for text in draws.remarks]
    texts += [(f"k = {k} is left out: no query has that many keys", "k-left-out") for k in sorted(left_out)]
    if isinstance(loaded.module, Encoder) and loaded.task in TASKS:
        length = loaded.training.length if loaded.training is not None else None
        if cannot_represent(TASKS[loaded.task], loaded.module.config, length):
            texts.append((OUT_OF_REACH, OUT_OF_REACH_CODE))
    for text, code in texts:
        audit.remarks[Remark("", text, code)] += 1


def _check_samples(samples: int, labels: Tensor | None) -> None:
    if labels is not None and len(labels) != samples:
        counts_words = f"{len(labels)} for {counted(samples, 'sample')}"
        raise InputError(f"labels must have one entry per sample. Got {counts_words}.")
    if labels is not None and labels.ndim != 1:
        raise InputError(f"labels must be one class per sample, of shape ({samples},). Got {tuple(labels.shape)}.")
    if not samples:
        raise InputError("There are no inputs to measure on: the number of samples is 0.")


def _accuracy(classes: Tensor, labels: Tensor | None, audit: Audit) -> float | None:
    """Return the fraction of predictions that equal the labels; NaN logits are wrong. None without labels."""
    if lost := int((classes == NO_CLASS).sum()):
        text = f"logits are NaN for {lost} of {counted(len(classes), 'sample')}: they count as wrong"
        audit.remarks[Remark("", text, "nan-logits")] += 1
    return None if labels is None else float((classes == labels.cpu()).double().mean())


def _provenance(run: ModelRun, queries: int | None, min_keys: int) -> dict[str, Any]:
    return {
        "semdiag": version("semdiag"),
        "torch": str(torch.__version__),
        "device": run.device.type,
        "dtype": str(run.dtype).removeprefix("torch."),
        **({} if queries is None else {"queries": queries}),
        **({} if min_keys == 1 else {"min_keys": min_keys}),
    }


def _check_real(real: Tensor | None, count: int, samples: int | None) -> None:
    if real is not None and (len(real) < count or (len(real) > count and samples is None)):
        counts_words = f"{counted(len(real), 'row')} for {counted(count, 'sample')}"
        raise InputError(f"real must have one row per sample. Got {counts_words}.")


def no_attention(path: str, audit: Audit) -> InputError:
    """Return the error that no attention was captured while a model ran, with the reason if known."""
    reasons = "; ".join(sorted({f"{skipped.operation}: {skipped.reason}" for skipped in audit.skipped}))
    usual = "Attention without a softmax (linear, sigmoid) cannot be measured; see docs/your-own-model.md"
    return InputError(f"No softmax attention was seen while {path} ran. {reasons or usual}.")


def _check_keys(path: str, rows: pd.DataFrame, min_keys: int, draws: QueryDraws) -> None:
    if not rows.empty:
        return
    ways = []
    query = "query"
    if draws.share < 1:
        ways.append("a larger --queries")
        query = "drawn query"
    if min_keys > 1:
        ways.append("a smaller --min-keys")
    keys = f"{min_keys} keys" if min_keys > 1 else "a key"
    way = f" Use {' or '.join(ways)}." if ways else ""
    raise InputError(f"No {query} of {path} has {keys}.{way}")


_ENCODER_FACTS = (
    "attention", "k", "global_tokens", "norm", "pooling", "blocks", "heads", "width", "length",
)  # fmt: skip


def _model_row(
    loaded: LoadedModel, collected: Collector, draws: QueryDraws, audit: Audit, facts: dict[str, object]
) -> pd.DataFrame:
    layers = collected.layers
    row: dict[str, object] = {
        "model": loaded.path,
        **{name: getattr(loaded, name) for name in ("sha256", "weights_sha256", "source", "snapshot", "task")},
        "attention": layers.kind,
        "k": None,
        "global_tokens": 0,
        **dict.fromkeys(("norm", "pooling", "setting")),
        "seed": loaded.seed,
        "epoch": loaded.epoch,
        "blocks": len(layers),
        "heads": int(layers.largest("heads")),
        "width": None,
        "length": int(layers.largest("longest")),
        "parameters": sum(p.numel() for p in loaded.module.parameters()),
        "samples": collected.samples,
        "drawn": draws.count if draws.count is not None and draws.share < 1 else 0,
        "share": draws.share,
        "share_kept": collected.share_kept,
        "attention_found": len({*audit.modules, *(skipped.module for skipped in audit.skipped)}),
        "attention_captured": len(layers.modules),
        **{name: layers.largest(name) for name in RESIDUALS},
        **facts,
    }
    if isinstance(loaded.module, Encoder):
        config = loaded.module.config
        row |= {name: getattr(config, name) for name in _ENCODER_FACTS} | {"setting": setting_in_words(loaded)}
        if loaded.training is not None:
            row["length"] = loaded.training.length  # length of the samples, without PAD
    types = dict.fromkeys(("k", "seed", "epoch", "width"), "Int64")
    types |= dict.fromkeys(("sha256", "weights_sha256", "task"), "str")
    types["accuracy"] = "float64"
    return typed(pd.DataFrame([row]), types)


DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in ("float32", "float64", "bfloat16", "float16")}
HALF = "bfloat16", "float16"  # for external models only; their scores are computed in float32

_MOST = 10**9  # largest number of samples, in a batch or in all


@dataclass(frozen=True)
class Conditions:
    """Conditions under which every model of a survey is measured."""

    inputs: Path | None = None  # token ids, or text (.txt); None means each checkpoint's own held-out samples
    samples: int = 500  # number of default inputs, of inputs of unknown length, and of windows of a text
    first: int | None = None  # number of first samples of given inputs, or of the model's own; None means all
    batch_size: int = 100
    device: str = "auto"
    dtype: str = "auto"  # key of DTYPES, or auto; see decided()
    seed: int = 0  # random seed for fresh samples and for resampling
    min_keys: int = 1  # smallest number of keys of a query that counts
    queries: int | None = None  # number drawn per sample and head of the longest sequence; None means all
    max_queries: int = MAX_QUERIES  # largest number of rows kept per model
    k: tuple[int, ...] = ()  # counterfactual numbers of heavy hitters, for models with full attention
    k_lowers: bool = False  # whether a k above the inputs' length is lowered to it, as for a default
    config: dict[str, Any] | None = None  # configuration for checkpoints of the paper's code
    head: str = "auto"  # head of Hugging Face models: as configured, or none
    texts: TextOptions = AS_THEY_ARE  # how texts become inputs of external models
    encoders_only: bool = False  # whether external models are refused
    probe_samples: int | None = None  # number of samples for probes that run a model many times; None means all
    plans: tuple[Plan, ...] = ()  # further measurements
    unfinished: Path | None = None  # folder for parts that are finished, from which an interrupted command goes on

    def __post_init__(self) -> None:
        QueryDraws(self.queries, self.seed)  # refuses too few queries
        for name in ("samples", "batch_size", "min_keys", "max_queries"):
            smallest = LEAST_MAX_QUERIES if name == "max_queries" else 1
            if getattr(self, name) < smallest:
                raise InputError(f"{name} must be at least {smallest}. Got {getattr(self, name)}.")
            if getattr(self, name) > _MOST:
                raise InputError(f"{name} must be at most {_MOST}. Got {getattr(self, name)}.")
        if self.first is not None and self.first < 1:
            raise InputError(f"first must be at least 1. Got {self.first}.")
        if self.dtype not in {"auto", *DTYPES}:
            raise InputError(f"dtype must be auto, {', '.join(DTYPES)}. Got {self.dtype!r}.")
        for plan in self.plans:
            if not isinstance(plan, Plan):
                raise TypeError(f"Plans are instances of subclasses of Plan. Got {plan!r}.")
        kinds = [type(plan).__name__ for plan in self.plans]
        for kind in kinds:
            if kinds.count(kind) > 1:  # the later plan's tables would replace the earlier one's
                raise TypeError(f"Conditions take one plan of a type. Got several of {kind}.")

    def decided(self, models: Sequence[LoadedModel], device: torch.device) -> Self:
        """Replace ``auto`` by one dtype for all models."""
        encoders = [model.path for model in models if not model.external]
        if self.dtype in HALF and encoders:
            raise InputError(
                f"dtype {self.dtype} is for external models, but {encoders[0]} is an encoder of semdiag."
            )
        if self.dtype != "auto":
            return self
        single = device.type == "mps" or any(model.external for model in models)
        return replace(self, dtype="float32" if single else "float64")
