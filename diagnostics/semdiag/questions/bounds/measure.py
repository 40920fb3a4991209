"""The constants of the theory for one model, as tables: norms, bounds in both forms, measured slopes."""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, first_samples
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.bounds.block_bounds import Assumption, log_input_constant, query_norm
from semdiag.mathematics.spectral_norms import bilinear_form_norm, log, value_output_norm
from semdiag.measuring.calls.running import running
from semdiag.measuring.encoders.network_constants import (
    BlockForms,
    LocalBounds,
    NetworkForms,
    local_bounds,
    network_forms,
)
from semdiag.measuring.encoders.traces import score_gradient_bounds, trace_inputs
from semdiag.measuring.encoders.weights import NamedTensor, named_tensors, not_finite
from semdiag.measuring.probe import Probe, Subject
from semdiag.measuring.table import ALL, Table, columns_of
from semdiag.questions.bounds import BoundsPlan
from semdiag_models import Encoder
from semdiag_models.training import with_float64

PROJECTIONS = Table(
    "projections",
    "One row per head of an external model: Γ and Υ, or why they are not available.",
    columns_of("model str; layer head int64; gamma upsilon float64; reason str"),
)

_TOLERANCE = 1e-4  # relative, between what a layer returned and what attention was given


def projection_norms(loaded: LoadedModel, batches: Iterable[Batch]) -> pd.DataFrame:
    """Return Γ_h = scale · ‖[W_q b_q]ᵀ W_k‖₂ and Υ_h = ‖W_o^h W_v^h‖₂ of every head, where identifiable."""
    observer = _ProjectionObserver(loaded.module)
    modules = list(loaded.module.modules())
    linear = [part for part in modules if isinstance(part, nn.Linear) or _transposed(part)]
    handles = [part.register_forward_hook(observer.linear) for part in linear]
    handles += [part.register_forward_hook(observer.other) for part in modules if part not in linear]
    try:
        with running(loaded, observer.attention) as run:
            for batch in first_samples(batches, 1):
                run(batch)
    finally:
        for handle in handles:
            handle.remove()
    rows = [row for number, layer in sorted(observer.layers.items()) for row in _rows(loaded.path, number, layer)]
    return PROJECTIONS.of_rows(rows)


class _ProjectionObserver:
    """Finds the linear layers that the queries, keys and values of attention come from, and its output goes to."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.returned: list[tuple[nn.Module, Tensor]] = []  # by linear layers, since the last attention
        self.without_output: dict[str, Any] | None = None  # the last layer, while its W_o has not run
        self.projected: tuple[dict[str, Any], Tensor] | None = None  # the last layer, and what its W_o returned
        self.layers: dict[int, dict[str, Any]] = {}

    def linear(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what a linear layer returned; one that was given the mixed values is W_o."""
        if not _is_linear(module, inputs, output):
            return
        layer = self.without_output
        if layer is not None and _equal(inputs[0], _merged(layer["mixed"])):
            layer["out"] = _weights(module)[0]
            self.projected, self.without_output = (layer, output), None
        self.returned.append((module, output))

    def other(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Reject W_o if a module around it was given the mixed values alone, and changed what W_o returned."""
        if self.projected is None or len(inputs) != 1 or not all(isinstance(x, Tensor) for x in (*inputs, output)):
            return
        layer, returned = self.projected
        if _equal(inputs[0], _merged(layer["mixed"])) and not _equal(output, returned):
            layer["out"], layer["changed"] = None, True

    def attention(self, call: AttentionCall) -> None:
        """Look for the linear layers that returned the queries, keys and values of a call."""
        module = self.modules.get(call.module)
        layer: dict[str, Any] = {"heads": call.q.shape[1], "key_heads": call.k.shape[1], "scale": call.scale}
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else [None] * 3
            parts = zip("qkv", module.in_proj_weight.chunk(3), biases, strict=True)
            layer |= {name: (weight, bias) for name, weight, bias in parts}
            layer["out"] = module.out_proj.weight
        else:
            tensors = zip("qkv", (call.q, call.k, call.v), strict=True)
            layer |= {name: self._source(_merged(tensor)) for name, tensor in tensors}
            layer["mixed"] = call.mixed
            self.without_output = layer
        self.projected = None
        self.layers.setdefault(call.layer, layer)
        self.returned.clear()

    def _source(self, wanted: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Return weight and bias of the linear layer, or of the part of one, that returned a tensor."""
        for module, returned in reversed(self.returned):
            weight, bias = _weights(module)
            width = wanted.shape[-1]
            for start in range(0, returned.shape[-1] - width + 1, width):
                part = slice(start, start + width)
                if _equal(returned[..., part], wanted):
                    return weight[part], None if bias is None else bias[part]
        return None


def _rows(model: str, number: int, layer: dict[str, Any]) -> list[dict[str, Any]]:
    heads, groups = layer["heads"], layer["heads"] // layer["key_heads"]
    reasons, gamma, upsilon = [], torch.full((heads,), torch.nan), torch.full((heads,), torch.nan)
    if layer.get("q") is None or layer.get("k") is None:
        cause = "queries" if layer.get("q") is None else "keys"
        reasons.append(f"Γ: the {cause} are not what a linear layer returned (rotary positions, a normalisation)")
    else:
        (query, bias), (key, _) = layer["q"], layer["k"]
        keys = _per_head(key, layer["key_heads"]).repeat_interleave(groups, 0)
        biases = None if bias is None else bias.detach().double().view(heads, -1)
        gamma = bilinear_form_norm(_per_head(query, heads), keys, biases, layer["scale"])
    if layer.get("v") is None or layer.get("out") is None:
        cause = "no linear layer returned the values" if layer.get("v") is None else "none took the mixed values"
        if "changed" in layer:
            cause = "what a linear layer made of the mixed values was changed (an adapter)"
        reasons.append(f"Υ: {cause}")
    else:
        values = _per_head(layer["v"][0], layer["key_heads"]).repeat_interleave(groups, 0)
        out = layer["out"].detach().double()
        upsilon = value_output_norm(out.view(len(out), heads, -1).transpose(0, 1), values)
    place = {"model": model, "layer": number, "reason": "; ".join(reasons)}
    numbers = zip(gamma.tolist(), upsilon.tolist(), strict=True)
    return [{**place, "head": head, "gamma": g, "upsilon": u} for head, (g, u) in enumerate(numbers)]


def _per_head(weight: Tensor, heads: int) -> Tensor:
    """Return (H · d_head, d) -> (H, d_head, d), float64."""
    return weight.detach().double().view(heads, -1, weight.shape[-1])


def _merged(values: Tensor) -> Tensor:
    """Return (B, H, L, D) -> (B, L, H · D)."""
    return values.transpose(1, 2).flatten(2)


def _equal(one: Tensor, two: Tensor) -> bool:
    if one.shape[-1] != two.shape[-1] or one.numel() != two.numel():
        return False
    least = max(_TOLERANCE, *(torch.finfo(x.dtype).eps for x in (one, two)))
    one, two = one.reshape(-1, one.shape[-1]).float(), two.reshape(-1, two.shape[-1]).float()
    return bool((one - two).abs().max() <= least * two.abs().max())


def _is_linear(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> bool:
    """Return whether a layer's output is W x + b with its weight and bias."""
    try:
        return _equal(F.linear(inputs[0], *_weights(module)), output)
    except (AttributeError, IndexError, RuntimeError, TypeError):  # packed weights, or another call
        return False


def _transposed(module: nn.Module) -> bool:
    """Return whether this is GPT-2's linear layer, which stores its weight transposed."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


def _weights(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return (weight.T if _transposed(module) else weight), bias


DIRECTIONS = 2  # random ones, besides the gradient's
RADIUS = 1e-3  # of a secant, relative to the tensor's Frobenius norm (absolute where that is 0)
_SECANT_TOKENS = 400  # tokens of the inputs over which secants are taken, at most (or one sample's)
_ROUNDING = 64 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Slope:
    """The loss in one tensor, as natural logarithms; −inf for a slope that rounding hides."""

    log_gradient: float  # ln ‖gradient‖ (Frobenius) of the mean loss
    log_secant: float  # ln of the largest |loss(θ + ρ) − loss(θ)| / ‖ρ‖, moving that tensor alone


def parameter_slopes(
    encoder: Encoder, tokens: Tensor, labels: Tensor, seed: int, score_reach: float, still: Collection[str]
) -> dict[str, Slope]:
    """Measure the mean cross-entropy's slopes in every parameter tensor; no secants of those that stand still."""
    _set_gradients(encoder, tokens, labels)
    tensors = named_tensors(encoder)
    rounding = _ROUNDING * (1 + score_reach)
    total = math.sqrt(sum(float(t.gradient.square().sum()) for t in tensors if t.gradient is not None))
    few = max(1, _SECANT_TOKENS // tokens.shape[1])
    generator = torch.Generator().manual_seed(seed)

    first, classes = tokens[:few], labels[:few]
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

    slopes = {}
    for tensor in tensors:
        gradient = tensor.values * 0 if tensor.gradient is None else tensor.gradient
        size = float(gradient.norm())
        log_secant = math.nan
        if tensor.name not in still:
            log_secant = _largest_secant(tensor, gradient, loss, start, rounding * (1 + abs(start)), generator)
        slopes[tensor.name] = Slope(_log(size, rounding * total), log_secant)
    encoder.zero_grad(set_to_none=True)
    return slopes


def _set_gradients(encoder: Encoder, tokens: Tensor, labels: Tensor) -> None:
    """Set the gradients of the mean loss, batch by batch."""
    encoder.zero_grad(set_to_none=True)
    for ids, classes in zip(torch.split(tokens, 25), torch.split(labels, 25), strict=True):
        batch = F.cross_entropy(encoder(ids), classes, reduction="sum") / len(tokens)
        batch.backward()  # type: ignore[no-untyped-call]


def _largest_secant(
    tensor: NamedTensor,
    gradient: Tensor,
    loss: Callable[[NamedTensor], float],
    start: float,
    rounding: float,
    generator: torch.Generator,
) -> float:
    """Return the natural logarithm of the steepest secant of the tensor alone."""
    values, before = tensor.values, tensor.values.clone()
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
    tokens = tokens[:SAMPLES].to(device, torch.int64)
    valid = runner.valid(tokens)
    if valid is not None:  # a sample of padding alone has no loss
        labels = None if labels is None else labels[:SAMPLES][valid.any(-1).cpu()]
        tokens = tokens[valid.any(-1)]
    broken = not_finite(runner)
    if broken:
        return _unknown(model, runner, broken)
    traces = trace_inputs(runner, tokens)
    classes = None if labels is None else labels[: len(tokens)].to(device, torch.int64)
    forms = network_forms(runner, traces)
    local = local_bounds(runner, tokens, classes) if secants else None
    slopes, point = {}, {}
    if classes is not None:
        point = score_gradient_bounds(runner, tokens, classes) if secants else {}
        reach = max(float(trace.score_reach.max()) for trace in traces.layers)
        still = {t.name for t in named_tensors(runner) if not secants or forms.log_sound[t.bound] == -math.inf}
        slopes = parameter_slopes(runner, tokens, classes, seed, reach, still)
    rows = [row for layer, block in enumerate(forms.blocks) for row in _layer_rows(layer, block)]
    rows += list(_network_rows(forms, local))
    constants = CONSTANTS.of_rows({"model": model, **row} for row in rows)
    parameters = PARAMETERS.of_rows(
        {"model": model, **row} for row in _parameter_rows(runner, forms, slopes, local, point)
    )
    return constants, parameters


def _layer_rows(layer: int, block: BlockForms) -> Iterator[Row]:
    weights, trace, sound = block.weights, block.trace, block.sound
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
        for name, value in (("network", local.network), ("network_any_residual", local.any_residual)):
            yield from _constant_rows(-1, name, "local", torch.tensor([[value]]), assumptions)


def _parameter_rows(
    encoder: Encoder,
    forms: NetworkForms,
    slopes: dict[str, Slope],
    local: LocalBounds | None,
    point: dict[str, float],
) -> Iterator[Row]:
    unmeasured = Slope(math.nan, math.nan)
    for tensor in named_tensors(encoder):
        slope = slopes.get(tensor.name, unmeasured)
        paper = tensor.layer >= 0 and tensor.name.endswith(_PAPER_TENSORS)
        yield {
            "tensor": tensor.name, "layer": tensor.layer, "group": tensor.group,
            "ln_sound": float(forms.log_sound[tensor.bound]),
            "ln_paper": float(forms.log_paper[tensor.bound]) if paper else math.nan,
            "ln_local": math.nan if local is None else local.tensors[tensor.name],
            "ln_point": point.get(tensor.name, math.nan), "ln_gradient": slope.log_gradient,
            "ln_secant": slope.log_secant, "infinite": forms.infinite[tensor.bound], "holds": forms.sound.holds,
        }  # fmt: skip


def _unknown(model: str, encoder: Encoder, broken: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of a model with parameters that are not finite: all unknown, with the reason."""
    finite = Assumption(f"parameters are finite ({broken[0]} is not)", {"tensors": len(broken)}, holds=False)
    nan = torch.tensor([math.nan])
    rows = [
        row for form in ("sound", "paper", "local") for row in _constant_rows(-1, "network", form, nan, (finite,))
    ]
    nothing = dict.fromkeys((name for name in PARAMETERS.columns if name.startswith("ln_")), math.nan)
    parameters = [
        {"tensor": t.name, "layer": t.layer, "group": t.group, **nothing, "infinite": 0, "holds": False}
        for t in named_tensors(encoder)
    ]
    return CONSTANTS.of_rows({"model": model, **row} for row in rows), PARAMETERS.of_rows(
        {"model": model, **row} for row in parameters
    )


def _measure(subject: Subject, plan: BoundsPlan, prepared: Any) -> Mapping[str, pd.DataFrame]:
    model = subject.model
    if model.external:
        why = "its normalisations, MLPs and loss are not known, as those of semdiag's encoders are"
        subject.note("bounds", why)
        return {"projections": projection_norms(model, subject.batches)}
    how: dict[str, Any] = {"model": model.path, "seed": subject.seed, "device": subject.device}
    how["secants"] = plan.tensor_secants
    constants, parameters = measure_constants(model.encoder, subject.tokens, subject.labels, **how)
    return {"constants": constants, "parameters": parameters}


PROBE = Probe(
    "bounds", BoundsPlan, (CONSTANTS, PARAMETERS, PROJECTIONS), _measure,
    provenance=lambda plan, samples, few: {"bound_samples": min(SAMPLES, samples)},
    reported=lambda options: BoundsPlan(),
)  # fmt: skip
