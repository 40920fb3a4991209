"""The loss on planes through a checkpoint in parameter space."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.planes import random_plane
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.encoders.weights import MovableEncoder, usable_samples
from semdiag.measuring.probe import Probe, Subject
from semdiag.measuring.table import Table
from semdiag_models import Encoder, InputError

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
    },
)


@dataclass(frozen=True)
class LandscapePlan:
    """Which points are evaluated.

    Raises:
        InputError: if a value is illegal.
    """

    planes: int = 1
    radius: float = 1.0  # half the side of a random plane, relative to each tensor's norm
    grid: int = 25  # cells per side; odd, so that the checkpoint is one of them

    def __post_init__(self) -> None:
        if self.planes < 1:
            raise InputError(f"planes must be at least 1. Got {self.planes}.")
        if not 0 < self.radius < math.inf:
            raise InputError(f"radius must be a positive number, like 1. Got {self.radius}.")
        if self.grid < 3 or self.grid % 2 == 0:
            raise InputError(
                f"grid must be an odd number of at least 3, so that the checkpoint is a cell. Got {self.grid}."
            )

    @property
    def points(self) -> int:
        """Return the number of evaluated points of one model."""
        return self.planes * (self.grid**2 + 1)


def landscape(
    model: LoadedModel | Encoder,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    plan: LandscapePlan | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    after_point: Callable[[int], None] = lambda points: None,
) -> pd.DataFrame:
    """Evaluate loss and accuracy on every cell of random planes through a checkpoint.

    Every row is a model that was run, none is interpolated. The model itself is not changed: a copy is moved.

    Source: docs/theory.md#empirical. Deviation: the directions of a random plane are orthogonal tensor by tensor.

    Args:
        model: A model from :func:`semdiag.load`, or an encoder of one's own.
        tokens: (N, L) int64.
        labels: (N,) classes.
        plan: planes, size and resolution.
        seed: Random seed for the directions.
        device: where to run.
        dtype: float32 or float64.
        after_point: called with 1 after each point.

    Returns:
        One row per point: plane, kind (random), x and y (1 moves each tensor by its own norm), distance from the
        checkpoint, place (grid, checkpoint), loss (nats), accuracy.

    Raises:
        InputError: if the labels are missing, or there is no sample.

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
    tokens, labels = usable_samples(moved.encoder, tokens, labels, device)
    generator = torch.Generator().manual_seed(seed)
    axis = (plan.radius * np.linspace(-1.0, 1.0, plan.grid)).tolist()
    rows: list[dict[str, Any]] = []
    for number in range(plan.planes):
        plane = random_plane(moved.origin, moved.slices(), generator)
        for place, x, y in [("checkpoint", 0.0, 0.0), *(("grid", x, y) for y in axis for x in axis)]:
            moved.move_to(plane.point(x, y) if place == "grid" else moved.origin)
            loss, accuracy = moved.loss_and_accuracy(tokens, labels)
            after_point(1)
            distance = float(plane.distances(torch.tensor(x), torch.tensor(y)))
            facts = {"plane": number, "kind": "random", "x": x, "y": y, "distance": distance, "place": place}
            facts |= {"samples": len(tokens), "loss": loss, "accuracy": accuracy}
            rows.append({"model": loaded.path, **facts})
    return LANDSCAPE.of_rows(rows)


def _measure(subject: Subject, plan: LandscapePlan, prepared: Any) -> Mapping[str, pd.DataFrame]:
    if subject.model.external:
        raise NotAvailableError("its loss is not known")
    table = landscape(
        subject.model,
        subject.tokens,
        subject.labels,
        plan=plan,
        seed=subject.seed,
        device=subject.device,
        dtype=subject.dtype,
        after_point=subject.after_point,
    )
    return {"landscape": table}


LOSS_SURFACE = Probe(
    "loss surface",
    LandscapePlan,
    (LANDSCAPE,),
    _measure,
    steps=lambda plan: int(plan.points),
    reported=lambda options: LandscapePlan() if options.thorough else None,
)
