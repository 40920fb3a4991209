"""Empirical Lipschitz estimates of one model: secants, gradients and Jacobians, beside the bounds."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing.attention_calls import BlockCall, watch_blocks
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.bounds.block_bounds import log_input_constant
from semdiag.mathematics.planes import random_direction, random_plane
from semdiag.mathematics.spectral_norms import log_root_sum_squares, token_jacobian_norm
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.encoders.network_constants import (
    blocks_at_points,
    log_exact_constant,
    log_point_constant,
    network_forms,
)
from semdiag.measuring.encoders.traces import score_gradient_bounds, trace_inputs
from semdiag.measuring.encoders.weights import MovableEncoder, not_finite, usable_samples
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.lipschitz import LipschitzPlan
from semdiag_files import InputError
from semdiag_models import Encoder
from semdiag_models.train import with_float64

SAMPLES = 20
_COLUMNS = 2**16  # pairs of tokens whose derivatives are taken, at most: 20 inputs of 57 tokens, one of 256
# Torch's forward derivatives call something that torch itself deprecates; the words depend on the Python version.
_TORCH_DEPRECATION = r"`torch\.jit\.script` is (deprecated|not supported in Python 3\.14\+)"
Row = dict[str, Any]


def block_jacobians(encoder: Encoder, tokens: Tensor, seed: int = 0) -> Iterator[Row]:
    """Yield every block's largest stretch found by power iteration, by sample."""
    tokens = tokens[:SAMPLES]
    forms = network_forms(encoder, trace_inputs(encoder, tokens))
    points = _points(encoder, tokens)
    generator = torch.Generator().manual_seed(seed)
    valid = encoder.valid(tokens)
    with torch.no_grad():
        x = encoder.embed(tokens)
    for layer, block in enumerate(encoder.blocks):
        start = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        with plain_attention(block):
            norms = _stretch(block, x, valid, start)
        with torch.no_grad():
            x = block(x, valid)
        bounds = log_input_constant(forms.blocks[layer].sound).expand(len(x))
        for sample, values in enumerate(zip(*norms, bounds.tolist(), *points[layer], strict=True)):
            numbers = dict(zip(("norm", "settled", "ln_sound", "ln_point", "ln_exact"), values, strict=True))
            yield {"layer": layer, "sample": sample, **numbers}


def _points(encoder: Encoder, tokens: Tensor) -> list[tuple[list[float], list[float]]]:
    """Return closed form and exact column sum by block and sample; NaN where the exact one costs too much."""
    bounds: list[tuple[list[float], list[float]]] = [([], []) for _ in encoder.blocks]
    for sample, ids in enumerate(torch.split(tokens, 1)):
        calls: list[BlockCall] = []
        with torch.no_grad(), watch_blocks(encoder, calls.append):
            encoder(ids)
        for call in calls:
            (at,) = blocks_at_points(encoder, call, encoder.valid(ids))
            affordable = (sample + 1) * call.tokens.shape[1] ** 2 <= _COLUMNS
            bounds[call.layer][0].append(log_point_constant(at))
            bounds[call.layer][1].append(log_exact_constant(at) if affordable else math.nan)
    return bounds


@contextmanager
def plain_attention(block: nn.Module) -> Iterator[None]:
    """Let a block attend in operations that have forward derivatives, inside the context."""
    attention: Any = block.attention
    core = attention.core
    core.fast = False
    try:
        yield
    finally:
        core.fast = True


def _stretch(block: nn.Module, x: Tensor, valid: Tensor | None, start: Tensor) -> tuple[list[float], list[bool]]:
    """Return the power iteration on the block's Jacobian; padded tokens neither move nor count."""
    counted = torch.ones_like(x[..., :1]) if valid is None else valid[..., None].to(x)

    def mapped(tokens: Tensor) -> Tensor:
        outputs: Tensor = block(tokens, valid) * counted
        return outputs

    def jvp(tangent: Tensor) -> Tensor:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):  # torch's version decides which
                warnings.filterwarnings("ignore", _TORCH_DEPRECATION, category)
            outputs: Tensor = torch.func.jvp(mapped, (x,), (tangent,))[1]
        return outputs

    pull_back = torch.func.vjp(mapped, x)[1]

    def vjp(cotangent: Tensor) -> Tensor:
        pulled: Tensor = pull_back(cotangent)[0]
        return pulled * counted

    norm = token_jacobian_norm(jvp, vjp, start * counted)
    return norm.value.tolist(), norm.settled.tolist()


LINES = 4  # random lines through the checkpoint for each group of tensors
GROUPS = ("qk", "value-output", "mlp-in", "mlp-out", "embedding", "head")
Loss = Callable[[Tensor], float]


def radii(largest: float, count: int = 7) -> tuple[float, ...]:
    """Return radii that double up to the largest."""
    return tuple(largest * 2.0**-power for power in range(count - 1, -1, -1))


def plane_secants(
    movable: MovableEncoder, loss: Loss, sizes: Sequence[float], planes: int, directions: int, seed: int
) -> Iterator[Row]:
    """Yield secants between all pairs of the checkpoint and evenly spaced points on circles around it."""
    generator = torch.Generator().manual_seed(seed)
    start = loss(movable.origin)
    angles = 2 * np.pi * np.arange(directions) / directions
    for draw in range(planes):
        plane = random_plane(movable.origin, movable.slices(), generator)
        for radius in sizes:
            places = radius * np.stack([np.cos(angles), np.sin(angles)], 1)
            values = np.array([start, *(loss(plane.point(float(x), float(y))) for x, y in places)])
            places = np.vstack([np.zeros(2), places])
            pairs = np.array(list(itertools.combinations(range(len(places)), 2)))
            first, second = pairs.T
            steps = torch.from_numpy(places[first] - places[second])
            distances = plane.distances(steps[:, 0], steps[:, 1]).cpu().numpy()
            changes = np.abs(values[first] - values[second])
            for distance, change in zip(distances, changes, strict=True):
                yield _row("all", draw, radius, float(distance), float(change))


def line_secants(movable: MovableEncoder, loss: Loss, sizes: Sequence[float], seed: int) -> Iterator[Row]:
    """Yield secants on random lines along which one group of tensors moves and the others stay."""
    generator = torch.Generator().manual_seed(seed)
    start = loss(movable.origin)
    for group, draw in itertools.product(GROUPS, range(LINES)):
        direction = random_direction(movable.origin, movable.slices(group), generator)
        length = float(direction.norm())
        if length == 0:
            continue
        for radius in sizes:
            ends = [loss(movable.origin + sign * radius * direction) for sign in (1, -1)]
            for end in ends:
                yield _row(group, draw, radius, radius * length, abs(end - start))
            yield _row(group, draw, radius, 2 * radius * length, abs(ends[0] - ends[1]))


def _row(group: str, draw: int, radius: float, distance: float, change: float) -> Row:
    slope = change / distance if distance > 0 else float("nan")
    return {"group": group, "draw": draw, "radius": radius, "distance": distance, "slope": slope}


_TOKENS = 4000  # of one backward pass


def ball_gradients(
    movable: MovableEncoder, tokens: Tensor, labels: Tensor, radius: float, draws: int, seed: int
) -> Iterator[Row]:
    """Yield gradients of the mean cross-entropy at the checkpoint and at random parameters in a ball around it."""
    generator = torch.Generator().manual_seed(seed)
    for draw in range(draws + 1):
        size = 0.0
        point = movable.origin
        if draw:
            size = radius * (1 - float(torch.rand((), generator=generator, dtype=torch.float64)))
            direction = random_direction(movable.origin, movable.slices(), generator)
            point = movable.origin + size * direction
        movable.move_to(point)
        distance = float((point - movable.origin).norm())
        norms = gradient_norms(movable, tokens, labels)
        forms = network_forms(movable.encoder, trace_inputs(movable.encoder, tokens))
        bounds = _group_bounds(movable, forms.log_sound) | {"all": float(forms.sound.log_value)}
        at_point = (
            [] if draw else [*score_gradient_bounds(movable.encoder, tokens, labels).values()]
        )  # b_k has none
        log_norm = (
            float(log_root_sum_squares(torch.tensor(at_point, dtype=torch.float64))) if at_point else math.nan
        )
        for group, slope in norms.items():
            row = {"draw": draw, "radius": size, "distance": distance, "group": group, "slope": slope}
            row["ln_point"] = log_norm if group == "qk" else math.nan
            yield {**row, "ln_sound": bounds[group], "holds": forms.sound.holds}


def gradient_norms(movable: MovableEncoder, tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the 2-norm of the mean cross-entropy's gradient at the current point, in total and by group."""
    movable.encoder.zero_grad(set_to_none=True)
    per_pass = max(1, _TOKENS // tokens.shape[1])
    for ids, classes in zip(torch.split(tokens, per_pass), torch.split(labels, per_pass), strict=True):
        loss = F.cross_entropy(movable.encoder(ids), classes, reduction="sum") / len(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in movable.encoder.parameters()]
    gradient_vector = torch.cat([gradient.flatten() for gradient in gradients])
    movable.encoder.zero_grad(set_to_none=True)
    squares = {
        group: sum(float(gradient_vector[part].square().sum()) for part in movable.slices(group))
        for group in GROUPS
    }
    return {"all": float(gradient_vector.norm())} | {group: math.sqrt(x) for group, x in squares.items()}


def _group_bounds(movable: MovableEncoder, log_sound: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the root of the sum of squares of each group's constants; a weight and its bias may share one."""
    bounds = {}
    for group in GROUPS:
        names = dict.fromkeys(place.bound for place in movable.places if place.group == group)
        constants = torch.stack([log_sound[name].reshape(()) for name in names])
        bounds[group] = float(log_root_sum_squares(constants, dim=0))
    return bounds


LOSS_SECANTS = Table(
    "loss_secants",
    "One row per pair of parameter settings.",
    columns_of("model group str; draw int64; radius distance slope float64"),
)
LOSS_GRADIENTS = Table(
    "loss_gradients",
    "One row per random parameter setting and group of tensors; ln_point bounds the gradient of queries and keys "
    "at the checkpoint, NaN elsewhere.",
    columns_of("model group str; draw int64; radius distance slope ln_sound ln_point float64; holds bool"),
)
JACOBIANS = Table(
    "jacobians",
    "One row per block and sample: its measured stretch, and bounds over all inputs (ln_sound) and at this one "
    "(ln_exact: largest column sum of the Jacobian, NaN for long inputs; ln_point: closed form).",
    columns_of("model str; layer sample int64; norm float64; settled bool; ln_sound ln_point ln_exact float64"),
)
TABLES = (LOSS_SECANTS, LOSS_GRADIENTS, JACOBIANS)


def points(plan: LipschitzPlan) -> int:
    """Return the number of evaluated points of one model."""
    circles = plan.planes * plan.directions + len(GROUPS) * LINES * 2
    return circles * len(radii(plan.radius)) + plan.draws + 3


def lipschitz_tables(
    model: LoadedModel | Encoder,
    tokens: Tensor,
    labels: Tensor | None,
    *,
    plan: LipschitzPlan | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    after_point: Callable[[int], None] = lambda points: None,
) -> dict[str, pd.DataFrame]:
    """Estimate from below how steep the loss of a copy is in the parameters, and each block in its input."""
    loaded = unnamed(model)
    plan = plan or LipschitzPlan()
    device = with_float64(device)
    movable = MovableEncoder(loaded.encoder, device=device, dtype=torch.float64, gradients=True)
    broken = not_finite(movable.encoder)
    if broken:
        raise InputError(f"{loaded.path} cannot be moved: its tensor {broken[0]} holds a NaN or an infinity.")
    labels = None if labels is None else labels[: plan.samples]
    tokens, labels = usable_samples(movable.encoder, tokens[: plan.samples], labels, device)

    def loss(point: Tensor) -> float:
        movable.move_to(point)
        after_point(1)
        return movable.loss_and_accuracy(tokens, labels)[0]

    rows: dict[str, list[Row]] = {"jacobians": list(block_jacobians(movable.encoder, tokens, seed))}
    secants = plane_secants(movable, loss, radii(plan.radius), plan.planes, plan.directions, seed)
    rows["loss_secants"] = [*secants, *line_secants(movable, loss, radii(plan.radius), seed)]
    rows["loss_gradients"] = []
    for row in ball_gradients(movable, tokens, labels, plan.radius, plan.draws, seed):
        rows["loss_gradients"].append(row)
        after_point(int(row["group"] == "all"))
    return {
        table.name: table.of_rows({"model": loaded.path, **row} for row in rows[table.name]) for table in TABLES
    }


def measure_lipschitz(subject: Subject, plan: LipschitzPlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    if subject.model.external:
        raise NotAvailableError("its loss is not known")
    return lipschitz_tables(
        subject.model,
        subject.tokens,
        subject.labels,
        plan=plan,
        seed=subject.seed,
        device=subject.device,
        after_point=subject.progress.advance,
    )
