"""Measurements: tidy tables, saved and loaded, from which everything else is drawn."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pandas as pd

from semdiag.measurement.tables import (
    AUDIT_TABLES,
    EVERY_TABLE,
    NEEDED,
    OPTIONAL_TABLES,
    TABLES,
    UNLESS_SAID,
    empty_table,
)
from semdiag_models import InputError


@dataclass(frozen=True, eq=False)
class Measurements:
    """Everything measured on one or several models.

    Every table has the column ``model`` (the path as the user named it). Layers, heads and positions count
    from 0; scores are in nats.

    Attributes:
        models: one row per model: path, sha256, source, snapshot, task, attention, k, global_tokens, norm,
            pooling, seed, epoch, blocks, heads, length, parameters, samples, inputs, accuracy, found and
            captured attention layers, residual. Of somebody else's model, what is not known is missing; blocks are
            the places where attention happens, attention is ``full``, ``causal`` or ``masked``.
        queries: one row per query: sample, layer, head, query, keys (n_i), kept (k_i), dispersion,
            separation (+inf where nothing is dropped), largest_weight (of its attention weights), and
            dispersion_kK, separation_kK, mass_kK (share of the weight on the K largest) for each counterfactual K.
        loads: one row per key: sample, layer, head, key, load, and load_kK.
        history: one row per epoch of each training run.
        non_finite: one row per sample, layer and head with scores that are NaN or infinite, and how many.
        provenance: versions, device, dtype, seed, command.
        calls: one row per place where attention happens (a module, and which of its calls in a forward): how it
            was captured, its mask, heads, number of calls and largest residual.
        projections: one row per head of models of others: Γ and Υ, or why they are not available.
        remarks: one row per thing to know about a captured attention, as a mask that adds -10,000.
        skipped: one row per operation that looks like attention and was not captured, with the reason.
        secants: one row per query, noise level and clean-noisy pair; see
            :func:`~semdiag.measurement.probes.noise.secants.measure_secants`. Empty if not measured.
        constants: one row per constant of the theory and form; see
            :func:`~semdiag.measurement.probes.bounds.constants.measure_constants`. Empty if not measured.
        parameters: one row per parameter tensor, bounds beside measured slopes; same function.
        masks: one row per noise level and query that drops a key; see
            :func:`~semdiag.measurement.probes.noise.masks.mask_stability`. Empty if not measured.
        noise_effects: one row per noise level and sample, what the noise does to the output; same function.
        sweep: one row per k, layer, head and quantity, percentiles within a model; see
            :func:`~semdiag.measurement.probes.k_sweep.k_sweep`. Empty if not measured.
        landscape: one row per evaluated point of a plane in parameter space; see
            :func:`~semdiag.measurement.probes.loss.landscape.landscape`. Empty if not measured.
        loss_secants: one row per pair of parameter settings; this and the next three: see
            :func:`~semdiag.measurement.probes.loss.lipschitz.lipschitz`. Empty if not measured.
        loss_gradients: one row per random parameter setting and group of tensors.
        end_points: one row per group of tensors.
        jacobians: one row per block and sample.
        runs: one row per training run; see :func:`~semdiag.measurement.runs.training_runs.run_table`. Empty unless
            convergence was asked for.
        along: one row per snapshot of a run, layer and number; see
            :func:`~semdiag.measurement.runs.along.measure_along`. Empty if not measured.
        predictors: one row per run, stage of its training and number that may predict its speed; see
            :func:`~semdiag.measurement.runs.predictors.measure_predictors`. Empty if not measured.
        lengths: one row per length of the inputs, layer and number; see
            :func:`~semdiag.measurement.runs.lengths.measure_lengths`. Empty if not measured.
    """

    models: pd.DataFrame
    queries: pd.DataFrame
    loads: pd.DataFrame
    history: pd.DataFrame
    non_finite: pd.DataFrame
    provenance: dict[str, Any] = field(default_factory=dict)
    calls: pd.DataFrame = field(default_factory=lambda: empty_table("calls"))
    projections: pd.DataFrame = field(default_factory=lambda: empty_table("projections"))
    remarks: pd.DataFrame = field(default_factory=lambda: empty_table("remarks"))
    skipped: pd.DataFrame = field(default_factory=lambda: empty_table("skipped"))
    secants: pd.DataFrame = field(default_factory=lambda: empty_table("secants"))
    constants: pd.DataFrame = field(default_factory=lambda: empty_table("constants"))
    parameters: pd.DataFrame = field(default_factory=lambda: empty_table("parameters"))
    masks: pd.DataFrame = field(default_factory=lambda: empty_table("masks"))
    noise_effects: pd.DataFrame = field(default_factory=lambda: empty_table("noise_effects"))
    sweep: pd.DataFrame = field(default_factory=lambda: empty_table("sweep"))
    landscape: pd.DataFrame = field(default_factory=lambda: empty_table("landscape"))
    loss_secants: pd.DataFrame = field(default_factory=lambda: empty_table("loss_secants"))
    loss_gradients: pd.DataFrame = field(default_factory=lambda: empty_table("loss_gradients"))
    end_points: pd.DataFrame = field(default_factory=lambda: empty_table("end_points"))
    jacobians: pd.DataFrame = field(default_factory=lambda: empty_table("jacobians"))
    runs: pd.DataFrame = field(default_factory=lambda: empty_table("runs"))
    along: pd.DataFrame = field(default_factory=lambda: empty_table("along"))
    predictors: pd.DataFrame = field(default_factory=lambda: empty_table("predictors"))
    lengths: pd.DataFrame = field(default_factory=lambda: empty_table("lengths"))

    def __post_init__(self) -> None:
        missing = {name: value for name, value in UNLESS_SAID.items() if name not in self.models}
        if missing:
            object.__setattr__(self, "models", self.models.assign(**missing))

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """Join the measurements of several models.

        Args:
            parts: at least one.

        Returns:
            Their tables, one below the other, with the first one's provenance.

        Raises:
            InputError: if two of them are of a model with the same path.
        """
        parts = list(parts)
        paths = [path for part in parts for path in part.models["model"]]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise InputError(f"{twice[0]} is named twice.")
        tables = {name: _joined([getattr(part, name) for part in parts]) for name in EVERY_TABLE}
        return cls(**tables, provenance=parts[0].provenance)

    def save(self, folder: Path | str) -> None:
        """Write one parquet file per table and ``provenance.json``; no file for what was not measured.

        Args:
            folder: made if absent.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in EVERY_TABLE:
            file, table = folder / f"{name}.parquet", getattr(self, name)
            if name not in TABLES and table.empty:
                file.unlink(missing_ok=True)
            else:
                table.to_parquet(file, index=False)
        (folder / "provenance.json").write_text(json.dumps(self.provenance, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read what :meth:`save` wrote.

        Args:
            folder: a folder written by :meth:`save`.

        Returns:
            The measurements.

        Raises:
            InputError: if a file is missing or damaged.
        """
        folder = Path(folder)
        try:
            tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES}
            for name in EVERY_TABLE[len(TABLES) :]:
                file = folder / f"{name}.parquet"
                tables[name] = pd.read_parquet(file) if file.exists() else empty_table(name)
            provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                f"{folder} does not hold saved measurements ({str(error).splitlines()[0]}). "
                "Make them with: semdiag report --keep-queries."
            ) from None
        optional = {name: " ".join(columns) for name, columns in (AUDIT_TABLES | OPTIONAL_TABLES).items()}
        for name, needed in (NEEDED | optional).items():
            missing = [column for column in needed.split() if column not in tables[name]]
            if missing:
                raise InputError(
                    f"{folder} does not hold saved measurements ({name}.parquet lacks {', '.join(missing)}). "
                    "Make them with: semdiag report --keep-queries."
                )
        return cls(**tables, provenance=provenance)

    def of(self, model: str) -> Self:
        """Return the measurements of one model.

        Args:
            model: a value of the column ``model``.
        """
        tables = {name: getattr(self, name) for name in EVERY_TABLE}
        own = {name: table[table["model"] == model] for name, table in tables.items()}
        return type(self)(**own, provenance=self.provenance)

    def _repr_html_(self) -> str:
        from semdiag.measurement.percentiles import layer_table

        columns = ["layer", "head", "queries", "mean", "p50", "p95", "p100"]
        parts = []
        for row in self.models.itertuples():
            table = layer_table(self.queries[self.queries["model"] == row.model], "dispersion")
            title = f"Semantic dispersion (nats), {row.task} {row.attention}: {row.model}"
            parts.append(
                f"<p>{_escape(title)}</p>{table[columns].to_html(index=False, float_format='{:.3g}'.format)}"
            )
        return "".join(parts)


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)] or tables[:1]
    return pd.concat(filled, ignore_index=True)


def _escape(text: str) -> str:
    from html import escape

    return escape(text)
