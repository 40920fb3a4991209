"""The loss on planes through a checkpoint in parameter space."""

from collections.abc import Callable, Mapping
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
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.landscape import LandscapePlan
from semdiag_models import Encoder

LANDSCAPE = Table(
    "landscape",
    "One row per evaluated point of a plane in parameter space.",
    columns_of(
        "model str; plane int64; kind str; x y distance float64; place str; samples int64; loss accuracy float64"
    ),
)


def landscape_table(
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
    """Evaluate loss and accuracy on every cell of random planes through a checkpoint, of which a copy is moved."""
    loaded = unnamed(model)
    plan = plan or LandscapePlan()
    movable = MovableEncoder(loaded.encoder, device=device, dtype=dtype)
    tokens, labels = usable_samples(movable.encoder, tokens, labels, device)
    generator = torch.Generator().manual_seed(seed)
    axis = (plan.radius * np.linspace(-1.0, 1.0, plan.grid)).tolist()
    rows: list[dict[str, Any]] = []
    for number in range(plan.planes):
        plane = random_plane(movable.origin, movable.slices(), generator)
        for place, x, y in [("checkpoint", 0.0, 0.0), *(("grid", x, y) for y in axis for x in axis)]:
            movable.move_to(plane.point(x, y) if place == "grid" else movable.origin)
            loss, accuracy = movable.loss_and_accuracy(tokens, labels)
            after_point(1)
            distance = float(plane.distances(torch.tensor(x), torch.tensor(y)))
            facts = {"plane": number, "kind": "random", "x": x, "y": y, "distance": distance, "place": place}
            facts |= {"samples": len(tokens), "loss": loss, "accuracy": accuracy}
            rows.append({"model": loaded.path, **facts})
    return LANDSCAPE.of_rows(rows)


def measure_landscape(subject: Subject, plan: LandscapePlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    if subject.model.external:
        raise NotAvailableError("its loss is not known")
    table = landscape_table(
        subject.model,
        subject.tokens,
        subject.labels,
        plan=plan,
        seed=subject.seed,
        device=subject.device,
        dtype=subject.dtype,
        after_point=subject.progress.advance,
    )
    return {"landscape": table}
