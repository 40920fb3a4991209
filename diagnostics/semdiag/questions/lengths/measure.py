"""A checkpoint on inputs of lengths that it was not trained on: accuracy, dispersion, separation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import scipy
import torch
import torch.nn.functional as F

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.measure import measure
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.runs.tables import LENGTHS
from semdiag.measuring.table import ALL
from semdiag_models import Encoder, InputError, find_task
from semdiag_models.recipe import padded_length

SHOWN = ("p5", "p50", "p95")
_SEED_OF_LENGTHS = 2**32  # fresh samples must not be the training data, which come from the run's own seed


def longer(encoder: Encoder, length: int) -> Encoder:
    """Copy an encoder for inputs up to a given length; its outputs for shorter ones stay the same.

    The parameters are the same. Positions are sinusoids, so further ones are well defined. Global tokens stand
    behind the longest possible input: in the copy they move to the positions behind ``length``, where the model
    has not seen them in training. CLS stays in front.

    Args:
        encoder: the model; it is not changed.
        length: of the longest input, at least its own.

    Returns:
        A copy in evaluation mode; the encoder itself if it takes inputs of this length.

    Raises:
        InputError: if the attention is random, whose keys are drawn for the trained length.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> longer(Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4)), 9).config.length
        9
    """
    config = encoder.config
    if length <= config.length:
        return encoder
    if config.attention == "random":
        raise InputError(
            f"Random attention drew its keys for inputs up to length {config.length}: there are none for length "
            f"{length}. Leave it out, or use lengths up to {config.length}."
        )
    first = next(encoder.parameters())
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and overwritten below
        copy = Encoder(replace(config, length=length)).with_exact_positions()
    copy = copy.to(device=first.device, dtype=first.dtype)
    copy.load_state_dict(encoder.state_dict())
    copy.positions[: len(encoder.positions)] = encoder.positions
    return copy.eval()


def check_lengths(models: Sequence[LoadedModel], lengths: Sequence[int]) -> None:
    """Refuse lengths on which a model cannot be evaluated, before anything is measured.

    Raises:
        InputError: if a length is below 1 or the task has no such string, a task is unknown or a text, or a
            model cannot be made longer.
    """
    for model in models:
        task = _task(model)
        for length in lengths:
            if length < 1:
                raise InputError(f"--lengths takes lengths of at least 1. Got {length}.")
            try:
                longer(model.encoder, _positions(model, length))
                task.sample(1, length, torch.Generator().manual_seed(0))
            except InputError as error:
                raise InputError(f"{model.path}: {error}") from None


def measure_lengths(
    model: LoadedModel,
    lengths: Sequence[int],
    *,
    samples: int = 500,
    seed: int = 0,
    batch_size: int = 100,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    after_batch: Callable[[int], None] = lambda samples: None,
) -> pd.DataFrame:
    """Evaluate a model on fresh samples of its task, one length after the other.

    Where PAD counts as a token (``pad_as_token``) samples are padded to a multiple of k, as they were in training.

    Args:
        model: a run of one of the tasks.
        lengths: of the inputs.
        samples: of each length.
        seed: of the samples.
        batch_size: samples at a time.
        device: where to run.
        dtype: of the model and of the scores.
        after_batch: called with the number of samples of each finished batch.

    Returns:
        One row per length, layer (−1: all) and number: quantity and statistic are accuracy (value, and low
        and high of its 95% Wilson interval; layer −1 only), dispersion and separation (p5, p50, p95; heads
        pooled; missing where nothing is finite).

    Raises:
        InputError: as in :func:`check_lengths`.
    """
    task, parts = _task(model), []
    for length in sorted(set(lengths)):
        generator = torch.Generator().manual_seed(_SEED_OF_LENGTHS + seed)
        tokens, labels = task.sample(samples, length, generator)
        positions, pad_id = _positions(model, length), model.encoder.config.pad_id
        tokens = F.pad(tokens, (0, positions - length), value=pad_id)
        fitting = replace(model, module=longer(model.encoder, positions).with_draws(seed))
        batches = {"batch_size": batch_size, "device": device, "dtype": dtype, "after_batch": after_batch}
        measured = measure(fitting, tokens, labels=labels, **batches)  # type: ignore[arg-type]
        common = {"model": model.path, "length": length, "samples": samples}
        parts += [{**common, **row} for row in (*_accuracy(measured), *_percentiles(measured))]
    return LENGTHS.of_rows(parts)


def _positions(model: LoadedModel, length: int) -> int:
    config = model.encoder.config
    return padded_length(length, config.k, config.pad_as_token)


def _task(model: LoadedModel) -> Any:
    if model.task is None or model.training is None or model.training.text is not None:
        raise InputError(
            f"{model.path}: --lengths needs fresh samples of the model's task, and it has none (a text, or no "
            "task)."
        )
    return find_task(model.task)


def _accuracy(measured: Measurements) -> list[dict[str, Any]]:
    row = measured.models.iloc[0]
    count, share = int(row["samples"]), float(row["accuracy"])
    interval = scipy.stats.binomtest(round(share * count), count).proportion_ci(0.95, method="wilson")
    numbers = {"value": share, "low": float(interval.low), "high": float(interval.high)}
    return [{"layer": ALL, "quantity": "accuracy", "statistic": s, "value": v} for s, v in numbers.items()]


def _percentiles(measured: Measurements) -> list[dict[str, Any]]:
    rows = []
    layers = [(int(str(layer)), queries) for layer, queries in measured.queries.groupby("layer")]
    for layer, queries in [(ALL, measured.queries), *layers]:
        for quantity in ("dispersion", "separation"):
            table = percentiles(queries[quantity])
            rows += [{"layer": layer, "quantity": quantity, "statistic": s, "value": table[s]} for s in SHOWN]
    return rows
