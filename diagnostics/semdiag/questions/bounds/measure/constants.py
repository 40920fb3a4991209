"""The constants of the theory for one model, as tables: norms, bounds in both forms, measured slopes."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from semdiag.mathematics.bounds.block_bounds import log_input_constant
from semdiag.mathematics.bounds.bound import Assumption
from semdiag.mathematics.bounds.layer_constants import query_norm
from semdiag.mathematics.logarithms import log
from semdiag.measuring.encoders.local_bounds import LocalBounds, local_bounds
from semdiag.measuring.encoders.network_constants import BlockForms, NetworkForms, network_forms
from semdiag.measuring.encoders.score_gradients import score_gradient_bounds
from semdiag.measuring.encoders.traces import trace_inputs
from semdiag.measuring.encoders.weights import named_tensors, not_finite
from semdiag.measuring.table import ALL, Table
from semdiag.questions.bounds.measure.slopes import Slope, parameter_slopes
from semdiag_models import Encoder
from semdiag_models.device import with_float64

CONSTANTS = Table(
    "constants",
    "One row per constant of the theory and form; layer and head may be ALL. ln_value is the largest over "
    "the inputs, ln_finite that of the inputs whose constant is finite, infinite how many have none.",
    {
        "model": "str",
        **dict.fromkeys(("layer", "head"), "int64"),
        **dict.fromkeys(("quantity", "form"), "str"),
        **dict.fromkeys(("ln_value", "ln_finite"), "float64"),
        "infinite": "int64",
        "holds": "bool",
        "assumptions": "str",
    },
)
PARAMETERS = Table(
    "parameters",
    "One row per parameter tensor: bounds beside measured slopes, natural logarithms; infinite: of how many "
    "inputs the sound constant is. ln_local and ln_point (of queries and keys, else NaN) bound the gradient.",
    {
        **dict.fromkeys(("model", "tensor"), "str"),
        "layer": "int64",
        "group": "str",
        **dict.fromkeys(("ln_sound", "ln_paper", "ln_local", "ln_point"), "float64"),
        **dict.fromkeys(("ln_gradient", "ln_secant"), "float64"),
        "infinite": "int64",
        "holds": "bool",
    },
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
    samples: int = SAMPLES,
    seed: int = 0,
    secants: bool = True,
    device: torch.device | str = "cpu",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measure every constant of Theorem 2 over the evaluated inputs, in float64."""
    device = with_float64(device)
    runner = copy.deepcopy(encoder).to(device=device, dtype=torch.float64).eval().requires_grad_(True)
    tokens = tokens[:samples].to(device, torch.int64)
    valid = runner.valid(tokens)
    if valid is not None:  # a sample of padding alone has no loss
        labels = None if labels is None else labels[:samples][valid.any(-1).cpu()]
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
        slopes = parameter_slopes(
            runner,
            tokens,
            classes,
            seed,
            secants=secants,
            score_reach=max(float(trace.score_reach.max()) for trace in traces.layers),
            constant={t.name for t in named_tensors(runner) if forms.log_sound[t.bound] == -math.inf},
        )
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
        "gamma": weights.gamma,
        "upsilon": weights.upsilon,
        "token_norm": token[None],
        "query_norm": query_norm(token, query_bias=True)[None],
        "score_reach": trace.score_reach.max()[None],
        "mlp_in": torch.as_tensor(sound.mlp.weight_in)[None],
        "mlp_out": torch.as_tensor(sound.mlp.weight_out)[None],
        "mlp_token_norm": trace.mlp_token_norm.max()[None],
        "mlp_hidden_norm": trace.hidden_norm.max()[None],
        "norm_lipschitz_attention": torch.as_tensor(sound.attention_norm).max()[None],
        "norm_lipschitz_mlp": torch.as_tensor(sound.mlp_norm).max()[None],
    }
    for name, values in measured.items():
        yield from _rows(layer, name, "measured", log(values))
    for name, values in weights.paper_code_norms().items():
        yield from _rows(layer, name, "paper code", log(values))
    for form, constants in (("sound", sound), ("paper", block.paper)):
        assumptions = constants.assumptions
        maps = constants.attention.log_map, constants.attention.log_form
        for name, values in zip(("attention_map", "bilinear_form"), maps, strict=True):
            yield from _rows(layer, name, form, values, assumptions)
        yield from _rows(layer, "block_input", form, log_input_constant(constants).reshape(-1, 1), assumptions)


_PER_HEAD = ("gamma", "upsilon", "attention_map", "bilinear_form")


def _rows(
    layer: int, quantity: str, form: str, values: Tensor, assumptions: Sequence[Assumption] = ()
) -> Iterator[Row]:
    """Yield rows for values of shape (heads,), or (inputs, heads), whose maximum counts."""
    each = values.reshape(-1, values.shape[-1])
    infinite = each == math.inf
    finite = each.masked_fill(infinite, -math.inf).amax(0).where(~infinite.all(0), math.nan)
    for head, value in enumerate(each.amax(0).tolist()):
        yield {
            "layer": layer,
            "head": head if quantity in _PER_HEAD else ALL,
            "quantity": quantity,
            "form": form,
            "ln_value": value,
            "ln_finite": finite[head].item(),
            "infinite": int(infinite[:, head].sum()),
            "holds": all(a.holds for a in assumptions),
            "assumptions": "; ".join(dict.fromkeys(str(a) for a in assumptions if not a.holds)),
        }


def _network_rows(forms: NetworkForms, local: LocalBounds | None) -> Iterator[Row]:
    yield from _rows(-1, "network", "sound", forms.each[:, None], forms.sound.assumptions)
    yield from _rows(-1, "network", "paper", forms.paper.log_value.reshape(1, 1), forms.paper.assumptions)
    if local is not None:
        not_needed = "a bound is known"  # by the local form: its masks are those at the point
        assumptions = [a for a in forms.sound.assumptions if not a.statement.startswith(not_needed)]
        for name, value in (("network", local.network), ("network_any_residual", local.any_residual)):
            yield from _rows(-1, name, "local", torch.tensor([[value]]), assumptions)


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
            "tensor": tensor.name,
            "layer": tensor.layer,
            "group": tensor.group,
            "ln_sound": float(forms.log_sound[tensor.bound]),
            "ln_paper": float(forms.log_paper[tensor.bound]) if paper else math.nan,
            "ln_local": math.nan if local is None else local.tensors[tensor.name],
            "ln_point": point.get(tensor.name, math.nan),
            "ln_gradient": slope.log_gradient,
            "ln_secant": slope.log_secant,
            "infinite": forms.infinite[tensor.bound],
            "holds": forms.sound.holds,
        }


def _unknown(model: str, encoder: Encoder, broken: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of a model with parameters that are not finite: all unknown, with the reason."""
    finite = Assumption(f"parameters are finite ({broken[0]} is not)", {"tensors": len(broken)}, holds=False)
    nan = torch.tensor([math.nan])
    rows = [row for form in ("sound", "paper", "local") for row in _rows(-1, "network", form, nan, (finite,))]
    nothing = dict.fromkeys((name for name in PARAMETERS.columns if name.startswith("ln_")), math.nan)
    parameters = [
        {"tensor": t.name, "layer": t.layer, "group": t.group, **nothing, "infinite": 0, "holds": False}
        for t in named_tensors(encoder)
    ]
    return CONSTANTS.of_rows({"model": model, **row} for row in rows), PARAMETERS.of_rows(
        {"model": model, **row} for row in parameters
    )
