"""Γ and Υ of models whose attention alone is known, where its projections can be told for certain."""

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
    """Return Γ_h = scale · ‖[W_q b_q]ᵀ W_k‖₂ and Υ_h = ‖W_o^h W_v^h‖₂ of every head, where identifiable.

    A linear layer counts as W_q if what it returned for the first sample is the queries that attention was given,
    so nothing (rotary positions, a normalisation) comes between; likewise W_k and W_v, apart or in one layer. W_o
    is the linear layer that is given the mixed values, unless a module around it that is given them alone changes
    what it returned (an adapter, as of LoRA). A layer counts as linear if it returned W x + b for its own W and b:
    one that adds to its weight, or quantises it, does not. ``nn.MultiheadAttention`` names its own.

    Source: docs/theory.md#norms. Deviation: none.

    Args:
        loaded: the model.
        batches: its inputs; the first sample is run.

    Returns:
        The table ``projections``: layer, head, gamma, upsilon (NaN where not available), and reason.
    """
    seen = _Seen(loaded.module)
    linear = [part for part in loaded.module.modules() if isinstance(part, nn.Linear) or _transposed(part)]
    handles = [part.register_forward_hook(seen.linear) for part in linear]
    handles += [part.register_forward_hook(seen.other) for part in loaded.module.modules() if part not in linear]
    try:
        with running(loaded, seen.attention) as run:
            for batch in first_samples(batches, 1):
                run(batch)
    finally:
        for handle in handles:
            handle.remove()
    rows = [row for layer in sorted(seen.found) for row in _rows(loaded.path, layer, seen.found[layer])]
    return PROJECTIONS.of_rows(rows)


class _Seen:
    """What the linear layers of a model returned lately, and which of them attention came from and went to."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.returned: list[tuple[nn.Module, Tensor]] = []
        self.open: dict[str, Any] | None = None
        self.taken: tuple[dict[str, Any], Tensor] | None = None  # by W_o: the layer, and what it made of them
        self.found: dict[int, dict[str, Any]] = {}

    def linear(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what a linear layer returned; if it was given the mixed values, it is the open layer's W_o."""
        if not _is_linear(module, inputs, output):
            return
        if self.open is not None and _equal(inputs[0], _merged(self.open["mixed"])):
            self.open["out"] = _weights(module)[0]
            self.taken, self.open = (self.open, output), None
        self.returned.append((module, output))

    def other(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """If it was given the mixed values alone, and changed what W_o returned, W_o is not all."""
        if self.taken is None or len(inputs) != 1 or not all(isinstance(x, Tensor) for x in (*inputs, output)):
            return
        found, returned = self.taken
        if _equal(inputs[0], _merged(found["mixed"])) and not _equal(output, returned):
            found["out"], found["changed"] = None, True

    def attention(self, call: AttentionCall) -> None:
        """Look for the layers that its queries, keys and values came from."""
        module = self.modules.get(call.module)
        found: dict[str, Any] = {"heads": call.q.shape[1], "key_heads": call.k.shape[1], "scale": call.scale}
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else [None] * 3
            parts = zip("qkv", module.in_proj_weight.chunk(3), biases, strict=True)
            found |= {name: (weight, bias) for name, weight, bias in parts}
            found["out"] = module.out_proj.weight
        else:
            given = zip("qkv", (call.q, call.k, call.v), strict=True)
            found |= {name: self._source(_merged(tensor)) for name, tensor in given}
            found["mixed"] = call.mixed
            self.open = found
        self.taken = None
        self.found.setdefault(call.layer, found)
        self.returned.clear()

    def _source(self, wanted: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the linear layer, or of the part of one, that returned this."""
        for module, returned in reversed(self.returned):
            weight, bias = _weights(module)
            width = wanted.shape[-1]
            for start in range(0, returned.shape[-1] - width + 1, width):
                part = slice(start, start + width)
                if _equal(returned[..., part], wanted):
                    return weight[part], None if bias is None else bias[part]
        return None


def _rows(model: str, layer: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    heads, groups = found["heads"], found["heads"] // found["key_heads"]
    reasons, gamma, upsilon = [], torch.full((heads,), torch.nan), torch.full((heads,), torch.nan)
    if found.get("q") is None or found.get("k") is None:
        what = "queries" if found.get("q") is None else "keys"
        reasons.append(f"Γ: the {what} are not what a linear layer returned (rotary positions, a normalisation)")
    else:
        (query, bias), (key, _) = found["q"], found["k"]
        keys = _per_head(key, found["key_heads"]).repeat_interleave(groups, 0)
        biases = None if bias is None else bias.detach().double().view(heads, -1)
        gamma = bilinear_form_norm(_per_head(query, heads), keys, biases, found["scale"])
    if found.get("v") is None or found.get("out") is None:
        what = "no linear layer returned the values" if found.get("v") is None else "none took the mixed values"
        what = (
            "what a linear layer made of the mixed values was changed (an adapter)" if "changed" in found else what
        )
        reasons.append(f"Υ: {what}")
    else:
        values = _per_head(found["v"][0], found["key_heads"]).repeat_interleave(groups, 0)
        out = found["out"].detach().double()
        upsilon = value_output_norm(out.view(len(out), heads, -1).transpose(0, 1), values)
    place = {"model": model, "layer": layer, "reason": "; ".join(reasons)}
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
    except (
        AttributeError,
        IndexError,
        RuntimeError,
        TypeError,
    ):  # its weight is packed, or it is called otherwise
        return False


def _transposed(module: nn.Module) -> bool:
    """Return whether this is GPT-2's linear layer, which stores its weight transposed."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


def _weights(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return (weight.T if _transposed(module) else weight), bias
