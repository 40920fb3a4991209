"""The constants of the theory for one model, as tables: norms, bounds in both forms, measured slopes."""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.mathematics.bounds.block_bounds import Assumption, log_input_constant, query_norm
from semdiag.mathematics.spectral_norms import log
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.encoders.network_constants import (
    BlockForms,
    LocalBounds,
    NetworkForms,
    local_bounds,
    network_forms,
)
from semdiag.measuring.encoders.traces import score_gradient_bounds, trace_inputs
from semdiag.measuring.encoders.weights import NamedTensor, named_tensors, not_finite
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import ALL, Table, columns_of
from semdiag.questions.bounds import BoundsPlan
from semdiag_models import Encoder
from semdiag_models.train import with_float64

DIRECTIONS = 2  # random ones, besides the gradient's
RADIUS = 1e-3  # of a secant, relative to the tensor's Frobenius norm (absolute where that is 0)
_SECANT_TOKENS = 400  # tokens of the inputs over which secants are taken, at most (or one sample's)
_ROUNDING = 64 * torch.finfo(torch.float64).eps


# ln of the size of the mean loss's gradient, and of the largest |loss(θ + ρ) − loss(θ)| / ‖ρ‖, moving one tensor
# alone; −inf for a slope that rounding hides
Slopes = tuple[float, float]


def parameter_slopes(
    encoder: Encoder, tokens: Tensor, labels: Tensor, seed: int, score_reach: float, zero_bounds: Collection[str]
) -> dict[str, Slopes]:
    """Measure the mean cross-entropy's slopes in every parameter tensor; no secants of those that stand still."""
    encoder.zero_grad(set_to_none=True)
    for ids, classes in zip(torch.split(tokens, 25), torch.split(labels, 25), strict=True):
        batch = F.cross_entropy(encoder(ids), classes, reduction="sum") / len(tokens)
        batch.backward()  # type: ignore[no-untyped-call]
    tensors = named_tensors(encoder)
    rounding = _ROUNDING * (1 + score_reach)
    total = math.sqrt(sum(float(t.gradient.square().sum()) for t in tensors if t.gradient is not None))
    batch_samples = max(1, _SECANT_TOKENS // tokens.shape[1])
    generator = torch.Generator().manual_seed(seed)

    first = tokens[:batch_samples]
    classes = labels[:batch_samples]
    valid = encoder.valid(first)
    with torch.no_grad():
        entering = [encoder.embed(first)]  # each block, and the classifier at last
        for block in encoder.blocks:
            entering.append(block(entering[-1], valid))
        start = float(F.cross_entropy(encoder.classify(entering[-1], valid), classes))

    @torch.no_grad()
    def loss(tensor: NamedTensor) -> float:
        """Return the loss of the few inputs, recomputed from the tensor's layer on: its input has not changed."""
        if tensor.group == "head":
            return float(F.cross_entropy(encoder.classify(entering[-1], valid), classes))
        x = encoder.embed(first) if tensor.group == "embedding" else entering[tensor.layer]
        for block in encoder.blocks[max(tensor.layer, 0) :]:
            x = block(x, valid)
        return float(F.cross_entropy(encoder.classify(x, valid), classes))

    slopes: dict[str, Slopes] = {}
    for tensor in tensors:
        gradient = tensor.values * 0 if tensor.gradient is None else tensor.gradient
        size = float(gradient.norm())
        log_secant = math.nan
        if tensor.name not in zero_bounds:
            log_secant = _largest_secant(tensor, gradient, loss, start, rounding * (1 + abs(start)), generator)
        slopes[tensor.name] = _log(size, rounding * total), log_secant
    encoder.zero_grad(set_to_none=True)
    return slopes


def _largest_secant(
    tensor: NamedTensor,
    gradient: Tensor,
    loss: Callable[[NamedTensor], float],
    start: float,
    rounding: float,
    generator: torch.Generator,
) -> float:
    """Return the natural logarithm of the steepest secant of the tensor alone."""
    values = tensor.values
    before = tensor.values.clone()
    radius = RADIUS * (float(before.norm()) or 1.0)
    directions = [torch.randn(before.shape, generator=generator, dtype=torch.float64) for _ in range(DIRECTIONS)]
    changes: list[float] = []
    try:
        for direction in (gradient, *(d.to(before.device) for d in directions)):
            length = float(direction.norm())
            if length == 0:
                continue
            values.copy_(before + radius / length * direction)
            changes.append(abs(loss(tensor) - start))
    finally:
        values.copy_(before)
    if not math.isfinite(start + sum(changes)):
        return math.nan
    return _log(max(changes, default=0.0), rounding) - math.log(radius)


def _log(size: float, rounding: float) -> float:
    """Return the natural logarithm of a size; −inf if rounding hides it, NaN if size or rounding is not finite."""
    if not math.isfinite(size + rounding):
        return math.nan
    return math.log(size) if size > rounding else -math.inf


CONSTANTS = Table(
    "constants",
    "One row per constant of the theory and form; layer and head may be ALL. ln_value is the largest over "
    "the inputs, ln_finite that of the inputs whose constant is finite, infinite how many have none.",
    columns_of(
        "model str; layer head int64; quantity form str; ln_value ln_finite float64; infinite int64; holds bool; "
        "assumptions str"
    ),
)
PARAMETERS = Table(
    "parameters",
    "One row per parameter tensor: bounds beside measured slopes, natural logarithms; infinite: of how many "
    "inputs the sound constant is. ln_local and ln_point (of queries and keys, else NaN) bound the gradient.",
    columns_of(
        "model tensor str; layer int64; group str; ln_sound ln_paper ln_local ln_point ln_gradient ln_secant "
        "float64; infinite int64; holds bool"
    ),
)

SAMPLES = 100
# Tensors that the paper's Theorem 2 speaks about, W carried to W_q and W_k and V to W_v and W_o.
_PAPER_TENSORS = ("q.weight", "k.weight", "v.weight", "out.weight", "expand.weight", "contract.weight")
Row = dict[str, Any]


def measure_constants(
    encoder: Encoder,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    model: str = "model",
    seed: int = 0,
    secants: bool = True,
    device: torch.device | str = "cpu",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measure every constant of Theorem 2 over the evaluated inputs, in float64."""
    device = with_float64(device)
    runner = copy.deepcopy(encoder).to(device=device, dtype=torch.float64).eval().requires_grad_(True)
    tokens, labels = _samples(runner, tokens[:SAMPLES].to(device, torch.int64), labels)
    broken = not_finite(runner)
    if broken:
        raise NotAvailableError(f"its tensor {broken[0]} holds a NaN or an infinity")
    traces = trace_inputs(runner, tokens)
    classes = None if labels is None else labels[: len(tokens)].to(device, torch.int64)
    forms = network_forms(runner, traces)
    local = local_bounds(runner, tokens, classes) if secants else None
    slopes = {}
    point = {}
    if classes is not None:
        point = score_gradient_bounds(runner, tokens, classes) if secants else {}
        reach = max(float(trace.score_reach.max()) for trace in traces.layers)
        zero_bounds = {
            t.name for t in named_tensors(runner) if not secants or forms.log_sound[t.bound] == -math.inf
        }
        slopes = parameter_slopes(runner, tokens, classes, seed, reach, zero_bounds)
    rows = [row for layer, block in enumerate(forms.blocks) for row in _layer_rows(layer, block)]
    rows += list(_network_rows(forms, local))
    constants = CONSTANTS.of_rows({"model": model, **row} for row in rows)
    parameters = PARAMETERS.of_rows(
        {"model": model, **row} for row in _parameter_rows(runner, forms, slopes, local, point)
    )
    return constants, parameters


def _samples(runner: Encoder, tokens: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the samples with a token, and their labels: one of padding alone has no loss."""
    valid = runner.valid(tokens)
    if valid is None:
        return tokens, labels
    with_tokens = valid.any(-1)
    return tokens[with_tokens], None if labels is None else labels[:SAMPLES][with_tokens.cpu()]


def _layer_rows(layer: int, block: BlockForms) -> Iterator[Row]:
    weights = block.weights
    trace = block.trace
    sound = block.sound
    token = trace.token_norm.max()
    measured = {
        "gamma": weights.gamma, "upsilon": weights.upsilon, "token_norm": token[None],
        "query_norm": query_norm(token)[None], "score_reach": trace.score_reach.max()[None],
        "mlp_in": torch.as_tensor(sound.mlp.weight_in)[None],
        "mlp_out": torch.as_tensor(sound.mlp.weight_out)[None],
        "mlp_token_norm": trace.mlp_token_norm.max()[None], "mlp_hidden_norm": trace.hidden_norm.max()[None],
        "norm_lipschitz_attention": torch.as_tensor(sound.attention_norm).max()[None],
        "norm_lipschitz_mlp": torch.as_tensor(sound.mlp_norm).max()[None],
    }  # fmt: skip
    for name, values in measured.items():
        yield from _constant_rows(layer, name, "measured", log(values))
    for name, values in weights.paper_code_norms().items():
        yield from _constant_rows(layer, name, "paper code", log(values))
    for form, constants in (("sound", sound), ("paper", block.paper)):
        assumptions = constants.assumptions
        maps = constants.attention.log_map, constants.attention.log_form
        for name, values in zip(("attention_map", "bilinear_form"), maps, strict=True):
            yield from _constant_rows(layer, name, form, values, assumptions)
        yield from _constant_rows(
            layer, "block_input", form, log_input_constant(constants).reshape(-1, 1), assumptions
        )


_PER_HEAD = ("gamma", "upsilon", "attention_map", "bilinear_form")


def _constant_rows(
    layer: int, quantity: str, form: str, values: Tensor, assumptions: Sequence[Assumption] = ()
) -> Iterator[Row]:
    """Yield rows for values of shape (heads,), or (inputs, heads), whose maximum counts."""
    each = values.reshape(-1, values.shape[-1])
    infinite = each == math.inf
    finite = each.masked_fill(infinite, -math.inf).amax(0).where(~infinite.all(0), math.nan)
    for head, value in enumerate(each.amax(0).tolist()):
        yield {
            "layer": layer, "head": head if quantity in _PER_HEAD else ALL, "quantity": quantity, "form": form,
            "ln_value": value, "ln_finite": finite[head].item(), "infinite": int(infinite[:, head].sum()),
            "holds": all(a.holds for a in assumptions),
            "assumptions": "; ".join(dict.fromkeys(str(a) for a in assumptions if not a.holds)),
        }  # fmt: skip


def _network_rows(forms: NetworkForms, local: LocalBounds | None) -> Iterator[Row]:
    yield from _constant_rows(-1, "network", "sound", forms.each[:, None], forms.sound.assumptions)
    yield from _constant_rows(-1, "network", "paper", forms.paper.log_value.reshape(1, 1), forms.paper.assumptions)
    if local is not None:
        not_needed = "a bound is known"  # by the local form: its masks are those at the point
        assumptions = [a for a in forms.sound.assumptions if not a.statement.startswith(not_needed)]
        yield from _constant_rows(-1, "network", "local", torch.tensor([[local.network]]), assumptions)


def _parameter_rows(
    encoder: Encoder,
    forms: NetworkForms,
    slopes: dict[str, Slopes],
    local: LocalBounds | None,
    point: dict[str, float],
) -> Iterator[Row]:
    for tensor in named_tensors(encoder):
        log_gradient, log_secant = slopes.get(tensor.name, (math.nan, math.nan))
        paper = tensor.layer >= 0 and tensor.name.endswith(_PAPER_TENSORS)
        yield {
            "tensor": tensor.name, "layer": tensor.layer, "group": tensor.group,
            "ln_sound": float(forms.log_sound[tensor.bound]),
            "ln_paper": float(forms.log_paper[tensor.bound]) if paper else math.nan,
            "ln_local": math.nan if local is None else local.tensors[tensor.name],
            "ln_point": point.get(tensor.name, math.nan), "ln_gradient": log_gradient,
            "ln_secant": log_secant, "infinite": forms.infinite[tensor.bound], "holds": forms.sound.holds,
        }  # fmt: skip


def measure_bounds(subject: Subject, plan: BoundsPlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    model = subject.model
    if model.external:
        raise NotAvailableError(
            "its normalisations, MLPs and loss are not known, as those of semdiag's encoders are"
        )
    constants, parameters = measure_constants(
        model.encoder,
        subject.tokens,
        subject.labels,
        model=model.path,
        seed=subject.seed,
        device=subject.device,
        secants=plan.tensor_secants,
    )
    return {"constants": constants, "parameters": parameters}
