"""Running a model over inputs and reducing its attention to measurements."""

import copy
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.row_statistics import RowStatistics, row_statistics
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.residual import recomputation_residual
from semdiag_models import Encoder, InputError

MAX_QUERIES = 20_000_000  # rows held in memory at once: about 1 GB


def measure(
    model: LoadedModel | Encoder,
    batches: Tensor | Iterable[Tensor],
    *,
    labels: Tensor | None = None,
    inputs: str = "given by the user",
    k: Sequence[int] = (),
    batch_size: int = 100,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    after_batch: Callable[[int], None] = lambda samples: None,
) -> Measurements:
    """Measure dispersion, separation and key load of every query of every attention layer.

    The model itself is not changed: a copy is moved, converted and put into evaluation mode.

    Args:
        model: from :func:`semdiag.load`, or an encoder of one's own.
        batches: token ids (N, L) int64, or an iterable of such batches.
        labels: (N,) classes, for the accuracy; None if unknown.
        inputs: where the inputs come from, for the report.
        k: counterfactual numbers of heavy hitters; their columns are added for every query.
        batch_size: samples at a time, if ``batches`` is one tensor.
        device: where to run.
        dtype: of the model and of the scores: float32 or float64.
        after_batch: called with the number of samples of each finished batch.

    Returns:
        Measurements of this one model.

    Raises:
        InputError: if there is no sample or nothing but PAD, a token id or a length does not fit the model, a k
            is not in 1 … length, or there would be more than 20 million queries.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> measure(encoder, torch.tensor([[0, 1, 1, 0]])).queries[["layer", "query", "keys"]].values.tolist()
        [[0, 0, 4], [0, 1, 4], [0, 2, 4], [0, 3, 4]]
    """
    loaded = model if isinstance(model, LoadedModel) else LoadedModel("model", "", model, "python", "unknown")
    batches = torch.split(batches, batch_size) if isinstance(batches, Tensor) else batches
    batches = [batch for batch in batches if len(batch)]
    _check(loaded.module, batches, k)
    encoder = copy.deepcopy(loaded.module).to(device=device, dtype=dtype).eval()
    collected = _Collector(loaded.path, k)
    logits = []
    with torch.inference_mode(), watch_attention(encoder, collected.add) as audit:
        for batch in batches:
            logits.append(encoder(batch.to(device, torch.int64)))
            collected.samples += len(batch)
            after_batch(len(batch))
    facts = {
        "samples": collected.samples,
        "inputs": inputs,
        "accuracy": None if labels is None else _accuracy(torch.cat(logits), labels),
        "attention_found": len(audit.modules),
        "attention_captured": len(collected.layers),
        "residual": collected.residual,
    }
    return Measurements(
        models=_model_row(loaded, facts),
        queries=collected.table(collected.queries),
        loads=collected.table(collected.loads),
        history=pd.DataFrame({"model": loaded.path, "epoch": [], **loaded.history}),
        non_finite=collected.table(collected.non_finite),
        provenance={
            "semdiag": version("semdiag"),
            "torch": str(torch.__version__),
            "device": torch.device(device).type,
            "dtype": str(dtype).removeprefix("torch."),
        },
    )


class _Collector:
    """Reduces calls to columns of numbers as they come."""

    def __init__(self, model: str, k: Sequence[int]) -> None:
        self.model, self.k, self.samples = model, k, 0
        self.layers: set[int] = set()
        self.residual = 0.0
        self.queries: list[dict[str, np.ndarray]] = []
        self.loads: list[dict[str, np.ndarray]] = []
        self.non_finite: list[dict[str, np.ndarray]] = [
            {name: np.zeros(0, np.int64) for name in ("sample", "layer", "head", "scores")}
        ]

    def add(self, call: AttentionCall) -> None:
        statistics = row_statistics(
            call.q, call.k, call.scale, call.allowed, call.selected, call.queries, top=max(self.k, default=0)
        )
        self.layers.add(call.layer)
        self.residual = float(np.maximum(self.residual, recomputation_residual(call)))  # keeps a NaN
        self._add_rows(call, statistics)
        self._add_loads(call, statistics)

    def _add_rows(self, call: AttentionCall, statistics: RowStatistics) -> None:
        sample, head, query = _places(statistics.keys)
        columns = {
            "sample": sample + self.samples,
            "layer": np.full_like(sample, call.layer),
            "head": head,
            "query": query,
            "keys": _flat(statistics.keys, np.int32),
            "kept": _flat(statistics.kept, np.int32),
            "dispersion": _flat(statistics.dispersion()),
            "separation": _flat(statistics.separation()),
            "largest_weight": _flat(statistics.largest_weight()),
        }
        for k in self.k:
            columns[f"dispersion_k{k}"] = _flat(statistics.dispersion(k))
            columns[f"separation_k{k}"] = _flat(statistics.separation(k))
        self.queries.append(_only(columns, call.queries, statistics.keys))
        counted = 1 if call.queries is None else call.queries[:, None]
        bad = (statistics.non_finite * counted).sum(2).cpu().numpy()
        if bad.any():
            where = np.nonzero(bad)
            layer = np.full_like(where[0], call.layer)
            self.non_finite.append(
                {"sample": where[0] + self.samples, "layer": layer, "head": where[1], "scores": bad[where]}
            )

    def _add_loads(self, call: AttentionCall, statistics: RowStatistics) -> None:
        sample, head, key = _places(statistics.load)
        columns = {
            "sample": sample + self.samples,
            "layer": np.full_like(sample, call.layer),
            "head": head,
            "key": key,
            "load": _flat(statistics.load, np.int32),
        }
        for k in self.k:
            columns[f"load_k{k}"] = _flat(statistics.key_load(k), np.int32)
        self.loads.append(_only(columns, call.queries, statistics.load))

    def table(self, parts: list[dict[str, np.ndarray]]) -> pd.DataFrame:
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return pd.DataFrame({"model": pd.Series([self.model] * len(columns["sample"]), dtype="str"), **columns})


def _check(encoder: Encoder, batches: list[Tensor], k: Sequence[int]) -> None:
    config = encoder.config
    if not batches:
        raise InputError("There are no inputs to measure on: the number of samples is 0.")
    for batch in batches:
        if batch.ndim != 2 or batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool:
            raise InputError(
                f"Inputs must be whole token ids of shape (N, L). Got {batch.dtype} {tuple(batch.shape)}."
            )
        if not 1 <= batch.shape[1] <= config.length:
            raise InputError(
                f"The model takes inputs of length 1 to {config.length}. Got length {batch.shape[1]}."
            )
        low, high = int(batch.min()), int(batch.max())
        if low < 0 or high >= config.vocabulary_size:
            wrong = low if low < 0 else high
            raise InputError(
                f"Token id {wrong} is out of range: the model knows 0 to {config.vocabulary_size - 1}."
            )
    if not (config.pad_as_token or config.extra_tokens) and all(
        bool((batch == config.pad_id).all()) for batch in batches
    ):
        raise InputError("There is no query to measure: every token of the inputs is PAD.")
    longest = max(batch.shape[1] for batch in batches)
    wrong_k = [value for value in k if not 1 <= value <= longest]
    if wrong_k:
        raise InputError(f"k must lie in 1 … {longest}, the length of the inputs. Got k={wrong_k[0]}.")
    tokens = sum(len(batch) * (batch.shape[1] + config.extra_tokens) for batch in batches)
    queries = tokens * config.blocks * config.heads
    if queries > MAX_QUERIES:
        most = max(1, MAX_QUERIES // ((longest + config.extra_tokens) * config.blocks * config.heads))
        raise InputError(
            f"{queries:,} queries are more than the {MAX_QUERIES:,} kept. Use --samples {most} or fewer."
        )


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1).cpu() == labels.cpu()).double().mean())


def _model_row(loaded: LoadedModel, facts: dict[str, object]) -> pd.DataFrame:
    config = loaded.module.config
    row = {
        "model": loaded.path,
        "sha256": loaded.sha256,
        "source": loaded.source,
        "snapshot": loaded.snapshot,
        "task": loaded.task,
        "attention": config.attention,
        "k": config.k,
        "global_tokens": config.global_tokens,
        "norm": config.norm,
        "pooling": config.pooling,
        "seed": loaded.seed,
        "epoch": loaded.epoch,
        "blocks": config.blocks,
        "heads": config.heads,
        "width": config.width,
        "length": config.length,
        "parameters": sum(p.numel() for p in loaded.module.parameters()),
        **facts,
    }
    whole = dict.fromkeys(("k", "seed", "epoch"), "Int64")
    text = dict.fromkeys(("sha256", "task"), "str")
    return pd.DataFrame([row]).astype({**whole, **text, "accuracy": "float64"})


def _places(values: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample, head and position of each entry of (B, H, L), flattened."""
    sample, head, position = np.indices(values.shape, dtype=np.int32)
    return sample.ravel(), head.ravel(), position.ravel()


def _flat(values: Tensor, dtype: type[np.generic] | None = None) -> np.ndarray:
    array = values.cpu().numpy().ravel()
    return array if dtype is None else array.astype(dtype)


def _only(columns: dict[str, np.ndarray], valid: Tensor | None, like: Tensor) -> dict[str, np.ndarray]:
    """Drop the rows of padded positions."""
    if valid is None:
        return columns
    keep = valid[:, None, :].expand(like.shape).cpu().numpy().ravel()
    return {name: column[keep] for name, column in columns.items()}
