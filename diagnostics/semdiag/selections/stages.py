"""What indexers of transformers compute before they choose, recorded while a model runs and kept in files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.mathematics.indexers import IndexerForm, IndexerInputs, index_scores
from semdiag.mathematics.rounding import number_format
from semdiag.selections.localise import Indexer
from semdiag_files import InputError

_PARTS = ("wq_b", "wk", "k_norm", "weights_proj")  # submodules of an indexer
_SCALED = "softmax_scaling"  # of the queries, where there is one
_FORMS = tuple(
    IndexerForm(rotary=rotary, at_end=at_end)
    for rotary, at_end in (*product(("halves", "interleaved"), (False, True)), ("none", False))
)
ARRAYS = (
    "index_queries", "index_keys", "head_weights", "cos", "sin", "norm_weight", "norm_bias", "norm_eps",
    "index_form", "positions",
)  # fmt: skip
_UNITS = 64  # units in the last place of its type by which a model's scores may differ from float64's


@dataclass
class StageRecorder:
    """What the parts of each indexer returned in the last call, by module."""

    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Record while the model runs."""
        self.outputs.clear()
        handles = []
        for name, module in model.named_modules():
            if all(isinstance(getattr(module, part, None), nn.Module) for part in _PARTS):
                handles.append(module.register_forward_pre_hook(self._arguments(name), with_kwargs=True))
                for part in (*_PARTS, _SCALED):
                    inner = getattr(module, part, None)
                    if isinstance(inner, nn.Module):
                        handles.append(inner.register_forward_hook(self._output(name, part)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arguments(self, name: str) -> Any:
        def keep(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            pairs = [each for each in (*arguments, *keywords.values()) if _is_rotation(each)]
            self.outputs[name] = {"rotation": pairs[0] if pairs else None}

        return keep

    def _output(self, name: str, part: str) -> Any:
        def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                self.outputs.setdefault(name, {})[part] = output.detach()

        return keep


def _is_rotation(argument: Any) -> bool:
    """Return whether an argument is cosines and sines, told by what they are, not by their place."""
    if (
        not isinstance(argument, tuple)
        or len(argument) != 2
        or not all(isinstance(one, Tensor) for one in argument)
    ):
        return False
    cos, sin = argument
    if cos.shape != sin.shape or cos.ndim != 3 or not cos.is_floating_point() or not cos.numel():
        return False
    size = cos.float().square() + sin.float().square()
    return bool((size.amax() - size.amin()).abs() < 0.05 * size.amax())


def recorded_indexer(
    name: str, module: nn.Module, outputs: Mapping[str, Any], scores: Tensor, real: Tensor, k: int
) -> Indexer | None:
    """Return an indexer whose recorded parts, in one of the known forms, give the model's own scores; else None.

    Args:
        name: of the module.
        module: the indexer.
        outputs: what its parts returned, as recorded.
        scores: (B, T, T), which it chose by.
        real: bool (B, T), false for padding.
        k: how many keys it chooses.
    """
    if not all(part in outputs for part in _PARTS) or scores.ndim != 3 or scores.shape[1] != scores.shape[2]:
        return None
    sequences = [_inputs(module, outputs, at, row) for at, row in enumerate(real) if bool(row.any())]
    unit = 2.0 ** -number_format(str(outputs["wq_b"].dtype)).digits
    for form in _FORMS:
        if all(
            _gives(sequence, form, matrix[row][:, row].cpu().double(), unit)
            for sequence, matrix, row in zip(sequences, scores[real.any(1)], real[real.any(1)], strict=True)
        ):
            return Indexer(name, sequences, form, k)
    return None


def _inputs(module: nn.Module, outputs: Mapping[str, Any], at: int, row: Tensor) -> IndexerInputs:
    """Return what an indexer computed of the real tokens of one sample."""
    keys = outputs["wk"][at, row].float().cpu()
    width = keys.shape[-1]
    queries = outputs.get(_SCALED, outputs["wq_b"])[at, row].float().cpu().reshape(len(keys), -1, width)
    weights = outputs["weights_proj"][at, row].float().cpu()
    weights = weights * (weights.shape[-1] * width) ** -0.5  # both scales, which change no choice
    rotation = outputs["rotation"] or (keys.new_zeros(1, len(row), 0),) * 2
    cos, sin = (each[at % len(each)][row.to(each.device)].float().cpu() for each in rotation)
    norm: Any = module.k_norm
    bias = getattr(norm, "bias", None)
    return IndexerInputs(
        queries, keys, weights, cos, sin, norm.weight.detach().float().cpu(),
        torch.zeros(width) if bias is None else bias.detach().float().cpu(),
        float(norm.eps), torch.arange(len(keys)),
    )  # fmt: skip


def _gives(inputs: IndexerInputs, form: IndexerForm, scores: Tensor, unit: float) -> bool:
    """Return whether a form gives the scores that a model chose by, where it allows a key."""
    right = index_scores(inputs.double(), form)
    both = (scores > torch.finfo(torch.float16).min / 2) & (right > -torch.inf)
    size = right.where(both, 0.0).abs().amax()
    return bool(both.any()) and bool(((scores - right).abs()[both] <= _UNITS * unit * size).all())


def stage_arrays(sequences: Sequence[IndexerInputs], form: IndexerForm) -> dict[str, Tensor]:
    """Return the arrays of an indexer, token by token, as :data:`ARRAYS` names them."""
    code = [("halves", "interleaved", "none").index(form.rotary), int(form.at_end)]
    return {
        "index_queries": torch.cat([each.queries for each in sequences]),
        "index_keys": torch.cat([each.keys for each in sequences]),
        "head_weights": torch.cat([each.head_weights for each in sequences]),
        "cos": torch.cat([each.cos for each in sequences]),
        "sin": torch.cat([each.sin for each in sequences]),
        "norm_weight": sequences[0].norm_weight,
        "norm_bias": sequences[0].norm_bias,
        "norm_eps": torch.tensor([sequences[0].eps], dtype=torch.float64),
        "index_form": torch.tensor(code),
        "positions": torch.cat([each.positions for each in sequences]),
    }


def indexer_of_arrays(module: str, arrays: Mapping[str, Tensor], k: int) -> Indexer | None:
    """Return an indexer from its arrays; None if some are missing."""
    if not all(name in arrays for name in ARRAYS):
        return None
    positions = arrays["positions"].long()
    rows = len(positions)
    for name in ("index_queries", "index_keys", "head_weights", "cos", "sin"):
        if len(arrays[name]) != rows or not bool(arrays[name].isfinite().all()):
            raise InputError(f"{module}.{name} must hold {rows:,} rows of finite numbers, as positions has.")
    begins = (positions == 0).nonzero().flatten().tolist()
    if not begins or begins[0] != 0 or not bool((positions.diff() == 1)[positions[1:] != 0].all()):
        raise InputError(f"{module}.positions must count each sequence from 0.")
    rotary, at_end = arrays["index_form"].tolist()
    form = IndexerForm(rotary=("halves", "interleaved", "none")[rotary], at_end=bool(at_end))
    sequences = [
        IndexerInputs(
            arrays["index_queries"][begin:end], arrays["index_keys"][begin:end], arrays["head_weights"][begin:end],
            arrays["cos"][begin:end], arrays["sin"][begin:end], arrays["norm_weight"], arrays["norm_bias"],
            float(arrays["norm_eps"][0]), positions[begin:end],
        )
        for begin, end in zip(begins, [*begins[1:], rows], strict=True)
    ]  # fmt: skip
    return Indexer(module, sequences, form, k)
