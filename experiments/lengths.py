"""Tests the runs of the study of lengths on longer inputs, and analyses them as lengths.md registers.

    python experiments/lengths.py --runs runs/lengths --out experiments/lengths
    python experiments/lengths.py --out experiments/lengths

With --runs the last checkpoints are tested, and accuracy.csv is written; without, it is read.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy
import torch
import torch.nn.functional as F
from t_intervals import UNKNOWN, t_interval

from semdiag.capturing.loading import LoadedModel, load
from semdiag.measuring.measure import measure
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.table import ALL
from semdiag_files import InputError
from semdiag_models import Encoder, find_task
from semdiag_models.sweep import read_sweep
from semdiag_models.tasks import padded_length

HERE = Path(__file__).parent
SWEEP = HERE / "lengths.toml"
LENGTHS = 20, 30, 40, 60, 80
SAMPLES = 1000
FULL = "full"
LEARNED = {"stack-manipulation": 0.9}  # accuracy at length 20; of the other tasks 0.95
SHOWN = ("p5", "p50", "p95")
_SEED_OF_LENGTHS = 2**32  # fresh samples must not be the training data, which come from the run's own seed
COLUMNS = ("task", "attention", "seed", "length", "accuracy", "dispersion", "separation")


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


def measure_lengths(
    model: LoadedModel,
    lengths: tuple[int, ...],
    *,
    samples: int = 500,
    seed: int = 0,
    batch_size: int = 100,
    dtype: torch.dtype = torch.float32,
) -> pd.DataFrame:
    """Evaluate a run on fresh samples of each length, padded as in training.

    Returns:
        One row per length, layer (-1: all) and number: quantity and statistic are accuracy (value, and
        its 95% Wilson interval: low, high), dispersion and separation (p5, p50, p95; missing where none).
    """
    task, parts = find_task(model.task), []
    for length in sorted(set(lengths)):
        generator = torch.Generator().manual_seed(_SEED_OF_LENGTHS + seed)
        tokens, labels = task.sample(samples, length, generator)
        positions, pad_id = _positions(model, length), model.encoder.config.pad_id
        tokens = F.pad(tokens, (0, positions - length), value=pad_id)
        fitting = replace(model, module=longer(model.encoder, positions).with_draws(seed))
        measured = measure(fitting, tokens, labels=labels, batch_size=batch_size, dtype=dtype)
        common = {"model": model.path, "length": length, "samples": samples}
        parts += [{**common, **row} for row in (*_accuracy(measured), *_percentiles(measured))]
    return pd.DataFrame(parts)


def _positions(model: LoadedModel, length: int) -> int:
    config = model.encoder.config
    return padded_length(length, config.k, config.pad_as_token)


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


def tested(runs: Path) -> pd.DataFrame:
    """One row per finished run and length: accuracy, and median δ and Δ of all layers and heads."""
    rows = []
    for run in read_sweep(SWEEP):
        path = runs / run.name / "last.pt"
        model = load(path) if path.exists() else None
        if model is None or model.epoch != run.training.epochs:
            continue
        table = measure_lengths(model, LENGTHS, samples=SAMPLES)
        pooled = table[table["layer"] == ALL].set_index(["length", "quantity", "statistic"])["value"]
        for length in LENGTHS:
            numbers = (pooled[length, "accuracy", "value"], *(pooled[length, q, "p50"] for q in COLUMNS[-2:]))
            rows.append((run.training.task, run.model.attention_label, run.training.seed, length, *numbers))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def differences(table: pd.DataFrame) -> pd.DataFrame:
    """By task, attention and length: accuracy less full attention's over the seeds that count, t-interval."""
    rows = []
    attentions = [name for name in table["attention"].unique() if name != FULL]
    for task, own in table.groupby("task", sort=False):
        at_20 = own[own["length"] == LENGTHS[0]].pivot_table(index="seed", columns="attention", values="accuracy")
        complete = at_20.reindex(columns=[FULL, *attentions]).dropna()
        seeds = complete[(complete >= LEARNED.get(str(task), 0.95)).all(axis=1)].index
        for attention in attentions:
            for length in LENGTHS[1:]:
                here = own[own["length"] == length].pivot_table(
                    index="seed", columns="attention", values="accuracy"
                )
                change = (
                    (here[attention] - here[FULL]).loc[seeds].to_numpy(np.float64) if len(seeds) else np.empty(0)
                )
                found = t_interval(change) if len(change) > 1 else UNKNOWN
                rows.append((task, attention, length, len(seeds), found.estimate, found.low, found.high))
    return pd.DataFrame(rows, columns=["task", "attention", "length", "seeds", "difference", "low", "high"])


def sentences(table: pd.DataFrame, found: pd.DataFrame) -> list[str]:
    """What the runs say, task by task."""
    said = []
    for task, own in found.groupby("task", sort=False):
        seeds = int(own["seeds"].iloc[0])
        if seeds < 2:
            said.append(
                f"{task}: these runs cannot tell ({seeds} of 3 seeds learned it with all three attentions)."
            )
            continue
        for attention, rows in own.groupby("attention", sort=False):
            clear = [r for r in rows.to_dict("records") if r["low"] > 0 or r["high"] < 0]
            each = ", ".join(f"{r['difference']:+.1%} at {r['length']}" for r in clear)
            said.append(
                f"{task}, {attention} less full, {seeds} seeds: {each or 'no length with a clear difference'}."
            )
    missing = 36 * len(LENGTHS) - len(table)
    return [*said, f"{missing // len(LENGTHS)} of 36 runs are missing."]


def main() -> None:
    """Test or read, write the tables, and print what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    file = options.out / "accuracy.csv"
    if options.runs is not None:
        table = tested(options.runs)
        options.out.mkdir(parents=True, exist_ok=True)
        table.to_csv(file, index=False)
    elif not file.exists():
        raise InputError(f"{file} is not there: name the runs with --runs.")
    table = pd.read_csv(file)
    found = differences(table)
    found.to_csv(options.out / "differences.csv", index=False)
    print("\n".join(sentences(table, found)))


if __name__ == "__main__":
    main()
