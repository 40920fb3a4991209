"""Γ and Υ of models of which only the attention is known, where its projections are certain."""

from collections.abc import Iterable
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, first_samples
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.spectral_norms import bilinear_form_norm, value_output_norm
from semdiag.measuring.calls.running import running
from semdiag.measuring.table import Table

PROJECTIONS = Table(
    "projections",
    "One row per head of an external model: Γ and Υ, or why they are not available.",
    {
        "model": "str",
        **dict.fromkeys(("layer", "head"), "int64"),
        **dict.fromkeys(("gamma", "upsilon"), "float64"),
        "reason": "str",
    },
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
