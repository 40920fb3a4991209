"""Running a model over inputs and reducing its attention to measurements."""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.audit import Audit
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.measurement.calls.collector import Collector
from semdiag.measurement.calls.layers import remarks_table, skipped_table
from semdiag.measurement.calls.running import running, unnamed
from semdiag.measurement.encoders.inputs import checked_tokens
from semdiag.measurement.measurements import Measurements
from semdiag_models import Encoder, InputError


def measure(
    model: LoadedModel | nn.Module,
    batches: Batch | Iterable[Batch],
    *,
    labels: Tensor | None = None,
    queries: Tensor | None = None,
    inputs: str = "given by the user",
    k: Sequence[int] = (),
    batch_size: int = 100,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    after_batch: Callable[[int], None] = lambda samples: None,
) -> Measurements:
    """Measure dispersion, separation and key load of every query of every attention layer, of any model.

    The model is not changed: it runs without gradients in evaluation mode, and every module's mode is restored.
    It is copied only if it has to be moved or converted.

    Args:
        model: from :func:`semdiag.load`, or any module of one's own.
        batches: what the model is called with: a tensor, a dictionary of keyword arguments or a tuple of
            positional ones; or an iterable of them. One tensor or dictionary is cut into batches.
        labels: (N,) classes, for the accuracy of semdiag's own models; None if unknown.
        queries: (N, L) bool over all samples, false for padding. By default read from the usual arguments
            (``attention_mask``, ``key_padding_mask``, …); padded queries are left out.
        inputs: where the inputs come from, for the report.
        k: counterfactual numbers of heavy hitters; their columns are added for every query.
        batch_size: samples at a time, if ``batches`` is one tensor or dictionary.
        device: where to run; None: where the model is.
        dtype: of the model and of the scores: float32 or float64; None: the model's own.
        after_batch: called with the number of samples of each finished batch.

    Returns:
        Measurements of this one model.

    Raises:
        InputError: if there is no sample or nothing but PAD, the model cannot be run on the inputs or has no
            attention that can be captured, a k is not in 1 … length, or there would be more than 20 million
            queries.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> measure(encoder, torch.tensor([[0, 1, 1, 0]])).queries[["layer", "query", "keys"]].values.tolist()
        [[0, 0, 4], [0, 1, 4], [0, 2, 4], [0, 3, 4]]
    """
    loaded = model if isinstance(model, LoadedModel) else unnamed(model)
    cut: Sequence[Batch] = batching.split(batches, batch_size)
    if not cut:
        raise InputError("There are no inputs to measure on: the number of samples is 0.")
    if loaded.external and any(value < 1 for value in k):
        raise InputError(f"k must be at least 1. Got k={min(k)}.")
    if isinstance(loaded.module, Encoder):
        cut = checked_tokens(loaded.module, cut, k)
    collected = Collector(loaded.path, k)
    with running(loaded, collected.add, device, dtype, queries) as run:
        answers = []
        for batch in cut:
            collected.start(batching.samples_of(batch))
            logits = run(batch)
            answers.append(None if logits is None else logits.argmax(1).cpu())  # all logits of a text are large
            after_batch(batching.samples_of(batch))
    _check_found(loaded, collected, run.audit, k)
    accuracy = None if labels is None or loaded.external else _accuracy(answers, labels)
    return Measurements(
        models=_model_row(loaded, collected, run.audit, {"inputs": inputs, "accuracy": accuracy}),
        queries=collected.queries(),
        loads=collected.loads(),
        history=pd.DataFrame({"model": loaded.path, "epoch": [], **loaded.history}),
        non_finite=collected.non_finite(),
        calls=collected.calls(),
        remarks=remarks_table(loaded.path, run.audit),
        skipped=skipped_table(loaded.path, run.audit, collected.layers.modules),
        provenance={
            "semdiag": version("semdiag"),
            "torch": str(torch.__version__),
            "device": run.device.type,
            "dtype": str(run.dtype).removeprefix("torch."),
        },
    )


def _check_found(loaded: LoadedModel, collected: Collector, audit: Audit, k: Sequence[int]) -> None:
    if not len(collected.layers):
        reasons = "; ".join(sorted({f"{seen.operation}: {seen.reason}" for seen in audit.skipped}))
        raise InputError(
            f"No softmax attention was seen while {loaded.path} ran. {reasons or 'See docs/your-own-model.md'}."
        )
    if not sum(collected.counted.values()):
        raise InputError("There is no query to measure: every token of the inputs is padding.")
    longest = int(collected.layers.largest("longest"))
    wrong = [value for value in k if not 1 <= value <= longest]
    if wrong:
        raise InputError(f"k must lie in 1 … {longest}, the largest number of keys. Got k={wrong[0]}.")


def _accuracy(answers: list[Any], labels: Tensor) -> float:
    return float((torch.cat(answers) == labels.cpu()).double().mean())


_OF_ENCODERS = (
    "attention", "k", "global_tokens", "norm", "pooling", "blocks", "heads", "width", "length",
)  # fmt: skip


def _model_row(loaded: LoadedModel, collected: Collector, audit: Audit, facts: dict[str, object]) -> pd.DataFrame:
    layers = collected.layers
    row: dict[str, object] = {
        "model": loaded.path,
        "sha256": loaded.sha256,
        "source": loaded.source,
        "snapshot": loaded.snapshot,
        "task": loaded.task,
        "attention": layers.kind,
        "k": None,
        "global_tokens": 0,
        "norm": None,
        "pooling": None,
        "seed": loaded.seed,
        "epoch": loaded.epoch,
        "blocks": len(layers),
        "heads": int(layers.largest("heads")),
        "width": None,
        "length": int(layers.largest("longest")),
        "parameters": sum(p.numel() for p in loaded.module.parameters()),
        "samples": collected.samples + collected.batch,
        "attention_found": len(audit.modules),
        "attention_captured": len(layers.modules),
        "residual": layers.largest("residual"),
        **facts,
    }
    if isinstance(loaded.module, Encoder):
        config = loaded.module.config
        row |= {name: getattr(config, name) for name in _OF_ENCODERS}
    whole = dict.fromkeys(("k", "seed", "epoch", "width"), "Int64")
    text = dict.fromkeys(("sha256", "task"), "str")
    return pd.DataFrame([row]).astype({**whole, **text, "accuracy": "float64"})
