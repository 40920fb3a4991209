"""The loss, and what attention does, on planes through a checkpoint in parameter space."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.capturing.loading import LoadedModel, load
from semdiag.mathematics.planes import Plane, plane_through, random_plane
from semdiag.measuring.calls.counted_rows import counted_rows
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.calls.scored_rows import NotAvailableError
from semdiag.measuring.encoders.movable import MovableEncoder, usable_samples
from semdiag.measuring.probe import Probe, Subject
from semdiag.measuring.table import Table
from semdiag_models import Encoder, InputError
from semdiag_models.errors import unknown_name

LANDSCAPE = Table(
    "landscape",
    "One row per evaluated point of a plane in parameter space.",
    {
        "model": "str",
        "plane": "int64",
        "kind": "str",
        **dict.fromkeys(("x", "y", "distance"), "float64"),
        "place": "str",
        "samples": "int64",
        **dict.fromkeys(("loss", "accuracy"), "float64"),
        **dict.fromkeys(("dispersion_p50", "dispersion_p95", "separation_p50", "separation_p5"), "float64"),
        "load_max": "float64",
    },
)

METRICS = ("loss", "dispersion")
DISPERSION_SAMPLES = 50
_MARGIN = 0.25  # around the snapshots, of the span of each axis
Row = dict[str, Any]


@dataclass(frozen=True)
class LandscapePlan:
    """Which points are evaluated, and what is measured there.

    Raises:
        InputError: if a value is illegal.
    """

    planes: int = 1  # random ones; not used if snapshots are given
    radius: float = 1.0  # half the side of a random plane, relative to each tensor's norm
    grid: int = 25  # cells per side; odd, so that the checkpoint is one of them
    through: tuple[Path, ...] = ()  # two snapshots: the plane through them and the checkpoint
    metrics: tuple[str, ...] = ("loss",)  # of METRICS

    def __post_init__(self) -> None:
        if self.planes < 1:
            raise InputError(f"planes must be at least 1. Got {self.planes}.")
        if not 0 < self.radius < math.inf:
            raise InputError(f"radius must be a positive number, like 1. Got {self.radius}.")
        if self.grid < 3 or self.grid % 2 == 0:
            raise InputError(
                f"grid must be an odd number of at least 3, so that the checkpoint is a cell. Got {self.grid}."
            )
        if len(self.through) not in (0, 2):
            raise InputError(f"through takes two snapshots, like epoch-0.pt,best.pt. Got {len(self.through)}.")
        if not self.metrics:
            raise InputError(f"Name what to measure: {', '.join(METRICS)}.")
        for name in self.metrics:
            if name not in METRICS:
                raise unknown_name("metric of a landscape", name, METRICS)

    @property
    def points(self) -> int:
        """Return the number of evaluated points of one model."""
        return self.grid**2 + 3 if self.through else self.planes * (self.grid**2 + 1)


def landscape(
    model: LoadedModel | Encoder,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    plan: LandscapePlan | None = None,
    snapshots: Mapping[str, Encoder] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    after_point: Callable[[int], None] = lambda points: None,
) -> pd.DataFrame:
    """Evaluate loss and accuracy, or the statistics of attention, on every cell of planes through a checkpoint.

    Every row is a model that was run, none is interpolated. The model itself is not changed: a copy is moved.

    Source: docs/theory.md#empirical. Deviation: the directions of a random plane are orthogonal tensor by tensor.

    Args:
        model: from :func:`semdiag.load`, or an encoder of one's own.
        tokens: (N, L) int64.
        labels: (N,) classes; needed for the loss.
        plan: planes, size, resolution and metrics.
        snapshots: two other parameter settings of the same shapes, by name, if the plane is to go through them.
        seed: of the directions.
        device: where to run.
        dtype: float32 or float64.
        after_point: called with 1 after each point.

    Returns:
        One row per point: plane, kind (random, through), x and y (1 is the length of all parameters;
        in random planes it moves each tensor by its own norm), distance from the checkpoint, place (grid,
        checkpoint, or a snapshot's name), loss (nats), accuracy; dispersion_p50, dispersion_p95,
        separation_p50, separation_p5 (nats), load_max of the first 50 samples. NaN for what was not measured.

    Raises:
        InputError: if the labels are missing, there is no sample, or the snapshots do not fit.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> few = LandscapePlan(grid=3)
        >>> table = landscape(encoder, torch.tensor([[0, 1, 1, 0]]), torch.tensor([1]), plan=few)
        >>> len(table), table["loss"].notna().all().item()
        (10, True)
    """
    loaded = unnamed(model)
    plan = plan or LandscapePlan()
    moved = MovableEncoder(loaded.encoder, device=device, dtype=dtype)
    if "loss" in plan.metrics:
        tokens, labels = usable_samples(moved.encoder, tokens, labels, device)
    tokens = tokens.to(device, torch.int64)
    if not len(tokens):
        raise InputError("There is nothing to measure: the number of samples is 0.")

    def evaluate(point: Tensor) -> Row:
        moved.move_to(point)
        row: Row = {}
        if "loss" in plan.metrics and labels is not None:
            row["loss"], row["accuracy"] = moved.loss_and_accuracy(tokens, labels)
        if "dispersion" in plan.metrics:
            row |= _attention_statistics(moved.encoder, tokens[:DISPERSION_SAMPLES])
        after_point(1)
        return row

    rows = []
    for number, (plane, axes, marks) in enumerate(_planes(moved, plan, snapshots or {}, seed)):
        kind = "through" if snapshots else "random"
        where = [("grid", float(x), float(y), plane.point(float(x), float(y))) for y in axes[1] for x in axes[0]]
        for place, x, y, point in [*marks, *where]:
            distance = float(plane.distances(torch.tensor(x), torch.tensor(y)))
            facts = {"plane": number, "kind": kind, "x": x, "y": y, "distance": distance, "place": place}
            rows.append({"model": loaded.path, **facts, "samples": len(tokens), **evaluate(point)})
    unknown = dict.fromkeys(LANDSCAPE.columns, math.nan)
    return LANDSCAPE.of_rows({**unknown, **row} for row in rows)


Mark = tuple[str, float, float, Tensor]


def _planes(
    moved: MovableEncoder, plan: LandscapePlan, snapshots: Mapping[str, Encoder], seed: int
) -> Iterator[tuple[Plane, tuple[NDArray[np.float64], NDArray[np.float64]], list[Mark]]]:
    """Yield planes with the coordinates of their cells, and further points to evaluate."""
    checkpoint: Mark = ("checkpoint", 0.0, 0.0, moved.origin)
    if snapshots:
        vectors = [_vector(moved, name, encoder) for name, encoder in snapshots.items()]
        try:
            plane, places = plane_through(moved.origin, *vectors)
        except ValueError as error:
            raise InputError(f"--through: {error} Name two other snapshots.") from None
        marks = [(name, *place, v) for name, place, v in zip(snapshots, places, vectors, strict=True)]
        axes = [_axis([0.0, *values], plan.grid) for values in zip(*places, strict=True)]
        yield plane, (axes[0], axes[1]), [checkpoint, *marks]
        return
    generator = torch.Generator().manual_seed(seed)
    axis = plan.radius * np.linspace(-1.0, 1.0, plan.grid)
    for _ in range(plan.planes):
        yield random_plane(moved.origin, moved.slices(), generator), (axis, axis), [checkpoint]


def _vector(moved: MovableEncoder, name: str, encoder: Encoder) -> Tensor:
    shapes = [tuple(p.shape) for p in encoder.parameters()]
    if shapes != [tuple(p.shape) for p in moved.encoder.parameters()]:
        raise InputError(
            f"--through: {name} has parameters of other shapes than the model. Name a snapshot of it."
        )
    return torch.cat([p.detach().flatten() for p in encoder.parameters()]).to(moved.origin)


def _axis(marks: Sequence[float], cells: int) -> NDArray[np.float64]:
    """Return evenly spaced coordinates around the marks; 0 is exactly one of them."""
    span = max(marks) - min(marks)
    step = span * (1 + 2 * _MARGIN) / (cells - 1)
    first = round((min(marks) - _MARGIN * span) / step)
    return step * np.arange(first, first + cells, dtype=np.float64)


def _attention_statistics(encoder: Encoder, tokens: Tensor) -> Row:
    """Return percentiles of δ and Δ, pooled over layers, heads and queries, and the largest key load."""
    collected: dict[str, list[Tensor]] = {"dispersion": [], "separation": [], "load": []}

    def add(call: AttentionCall) -> None:
        rows = counted_rows(call)
        collected["dispersion"].append(rows.statistics.dispersion()[rows.queries])
        collected["separation"].append(rows.statistics.separation()[rows.queries])
        collected["load"].append(rows.statistics.load.max().reshape(1))

    with torch.inference_mode(), watch_attention(encoder, add):
        encoder(tokens)
    joined = {name: torch.cat(parts).double().cpu().numpy() for name, parts in collected.items()}
    row: Row = {}
    for name, wanted in (("dispersion", (50, 95)), ("separation", (50, 5))):
        finite = joined[name][np.isfinite(joined[name])]
        values = np.percentile(finite, wanted) if finite.size else (math.nan, math.nan)
        row |= {f"{name}_p{p}": float(value) for p, value in zip(wanted, values, strict=True)}
    return row | {"load_max": float(joined["load"].max())}


def _measure(
    subject: Subject, plan: LandscapePlan, snapshots: Mapping[str, Encoder]
) -> Mapping[str, pd.DataFrame]:
    if subject.model.external:
        raise NotAvailableError("its loss is not known")
    table = landscape(
        subject.model,
        subject.tokens,
        subject.labels,
        plan=plan,
        snapshots=snapshots,
        seed=subject.seed,
        device=subject.device,
        dtype=subject.dtype,
        after_point=subject.after_point,
    )
    return {"landscape": table}


def _snapshots(plan: LandscapePlan, conditions: Any) -> dict[str, Encoder]:
    """Return the encoders that planes pass through, by file name; with the folder's name for several runs."""
    one_run = len({path.parent for path in plan.through}) == 1
    return {
        path.stem if one_run else f"{path.parent.name}/{path.stem}": load(path, conditions.config).encoder
        for path in plan.through
    }


def _check(model: LoadedModel, plan: LandscapePlan, snapshots: Mapping[str, Encoder]) -> None:
    """Refuse snapshots that span no plane with the model."""
    if snapshots and not model.external:
        next(_planes(MovableEncoder(model.encoder), plan, snapshots, 0))


LOSS_SURFACE = Probe(
    "loss surface",
    LandscapePlan,
    (LANDSCAPE,),
    _measure,
    prepare=_snapshots,
    check=_check,
    steps=lambda plan: int(plan.points),
    reported=lambda options: LandscapePlan(metrics=("loss", "dispersion")) if options.thorough else None,
)
