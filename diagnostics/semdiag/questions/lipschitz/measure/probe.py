"""Empirical Lipschitz estimates of one model: secants, gradients and Jacobians, beside the bounds."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.calls.scored_rows import NotAvailableError
from semdiag.measuring.encoders.movable import MovableEncoder, usable_samples
from semdiag.measuring.encoders.weights import not_finite
from semdiag.measuring.probe import Probe, Subject
from semdiag.measuring.table import Table
from semdiag.questions.lipschitz.measure.block_jacobians import block_jacobians
from semdiag.questions.lipschitz.measure.gradients import ball_gradients
from semdiag.questions.lipschitz.measure.secants import GROUPS, LINES, line_secants, plane_secants, radii
from semdiag_models import Encoder, InputError
from semdiag_models.device import with_float64

LOSS_SECANTS = Table(
    "loss_secants",
    "One row per pair of parameter settings.",
    {
        **dict.fromkeys(("model", "group"), "str"),
        "draw": "int64",
        **dict.fromkeys(("radius", "distance", "slope"), "float64"),
    },
)
LOSS_GRADIENTS = Table(
    "loss_gradients",
    "One row per random parameter setting and group of tensors; ln_point bounds the gradient of queries and keys "
    "at the checkpoint, NaN elsewhere.",
    {
        **dict.fromkeys(("model", "group"), "str"),
        "draw": "int64",
        **dict.fromkeys(("radius", "distance", "slope", "ln_sound", "ln_point"), "float64"),
        "holds": "bool",
    },
)
JACOBIANS = Table(
    "jacobians",
    "One row per block and sample: its measured stretch, and bounds over all inputs (ln_sound) and at this one "
    "(ln_exact: largest column sum of the Jacobian, NaN for long inputs; ln_point: closed form).",
    {
        "model": "str",
        **dict.fromkeys(("layer", "sample"), "int64"),
        "norm": "float64",
        "settled": "bool",
        **dict.fromkeys(("ln_sound", "ln_point", "ln_exact"), "float64"),
    },
)

FEWEST_DRAWS = 5
TABLES = (LOSS_SECANTS, LOSS_GRADIENTS, JACOBIANS)
Row = dict[str, Any]


@dataclass(frozen=True)
class LipschitzPlan:
    """What is drawn.

    Raises:
        InputError: if a value is illegal.
    """

    samples: int = 100  # inputs behind every loss
    planes: int = 8  # random planes, the units of the intervals
    directions: int = 8  # points on each circle in a plane
    draws: int = 120  # random parameters at which gradients are taken
    radius: float = 1.0  # the largest, relative to each tensor's norm

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("planes", 2), ("directions", 2), ("draws", FEWEST_DRAWS)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}. Got {getattr(self, name)}.")
        if not 0 < self.radius < math.inf:
            raise InputError(f"radius must be a positive number, like 1. Got {self.radius}.")

    @property
    def sizes(self) -> tuple[float, ...]:
        """Return the radii of the circles and lines."""
        return radii(self.radius)

    @property
    def points(self) -> int:
        """Return the number of evaluated parameter settings of one model."""
        circles = self.planes * self.directions + len(GROUPS) * LINES * 2
        return circles * len(self.sizes) + self.draws + 3


def lipschitz(
    model: LoadedModel | Encoder,
    tokens: Tensor,
    labels: Tensor | None,
    *,
    plan: LipschitzPlan | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    after_point: Callable[[int], None] = lambda points: None,
) -> dict[str, pd.DataFrame]:
    """Estimate from below how steep the loss is in the parameters, and each block in its input; in float64.

    The model itself is not changed: a copy is moved.

    Source: docs/theory.md#empirical. Deviation: see each part.

    Args:
        model: from :func:`semdiag.load`, or an encoder of one's own.
        tokens: (N, L) int64; the first ``plan.samples`` are used.
        labels: (N,) classes.
        plan: how much is drawn, and how far.
        seed: of all draws.
        device: where to run; float64 is needed, so ``mps`` is replaced by the CPU.
        after_point: called with 1 after each parameter setting.

    Returns:
        The tables ``loss_secants`` (:func:`~.secants.plane_secants`,
        ``line_secants``), ``loss_gradients`` (:func:`~.gradients.ball_gradients`) and ``jacobians``
        (:func:`~.block_jacobians.block_jacobians`).

    Raises:
        InputError: if the labels are missing, there is no sample, or a parameter is not a number.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> few = LipschitzPlan(planes=2, directions=2, draws=5)
        >>> tables = lipschitz(encoder, torch.tensor([[0, 1, 1, 0]]), torch.tensor([1]), plan=few)
        >>> sorted(tables), bool((tables["loss_gradients"]["slope"] > 0).any())
        (['jacobians', 'loss_gradients', 'loss_secants'], True)
    """
    loaded = unnamed(model)
    plan = plan or LipschitzPlan()
    device = with_float64(device)
    moved = MovableEncoder(loaded.encoder, device=device, dtype=torch.float64, gradients=True)
    broken = not_finite(moved.encoder)
    if broken:
        raise InputError(f"{loaded.path} cannot be moved: its tensor {broken[0]} holds a NaN or an infinity.")
    labels = None if labels is None else labels[: plan.samples]
    tokens, labels = usable_samples(moved.encoder, tokens[: plan.samples], labels, device)

    def loss(point: Tensor) -> float:
        moved.move_to(point)
        after_point(1)
        return moved.loss_and_accuracy(tokens, labels)[0]

    rows: dict[str, list[Row]] = {"jacobians": list(block_jacobians(moved.encoder, tokens, seed))}
    secants = plane_secants(moved, loss, plan.sizes, plan.planes, plan.directions, seed)
    rows["loss_secants"] = [*secants, *line_secants(moved, loss, plan.sizes, seed)]
    gradients = ball_gradients(moved, tokens, labels, plan.radius, plan.draws, seed)
    rows["loss_gradients"] = list(_counting(gradients, after_point))
    return {
        table.name: table.of_rows({"model": loaded.path, **row} for row in rows[table.name]) for table in TABLES
    }


def _counting(rows: Iterable[Row], after_point: Callable[[int], None]) -> Iterator[Row]:
    for row in rows:
        if row["group"] == "all":
            after_point(1)
        yield row


def _measure(subject: Subject, plan: LipschitzPlan, prepared: Any) -> Mapping[str, pd.DataFrame]:
    if subject.model.external:
        raise NotAvailableError("its loss is not known")
    return lipschitz(
        subject.model,
        subject.tokens,
        subject.labels,
        plan=plan,
        seed=subject.seed,
        device=subject.device,
        after_point=subject.after_point,
    )


def _provenance(plan: LipschitzPlan, samples: int, few: int) -> dict[str, Any]:
    return {"lipschitz_samples": min(plan.samples, samples)}


LIPSCHITZ = Probe(
    "Lipschitz estimates",
    LipschitzPlan,
    TABLES,
    _measure,
    steps=lambda plan: int(plan.points),
    provenance=_provenance,
    reported=lambda options: LipschitzPlan() if options.thorough else None,
)
