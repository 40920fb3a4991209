"""What is right according to the labels that come with inputs; labels that fit nothing are refused."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing.batches import Batch
from semdiag_models import InputError

IGNORED = -100  # as a target: no prediction counts here, as in torch's cross-entropy
_NAMES = ("labels", "label", "targets", "target")
_UNREAD = ("start_positions", "end_positions", "next_sentence_label", "class_labels", "mask_labels")
_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")  # ends of the names of classes whose labels are moved by one


def given_labels(module: nn.Module, batch: Batch) -> tuple[str, Any]:
    """Return the labels among a model's inputs and their name; an empty name and None if there are none."""
    if isinstance(batch, Mapping):
        named = dict(batch)
    elif isinstance(batch, tuple | list):
        try:
            parameters = [*inspect.signature(module.forward).parameters]
        except (TypeError, ValueError):
            return "", None
        named = dict(zip(parameters, batch, strict=False))
    else:
        return "", None
    return next(((name, named[name]) for name in _NAMES if named.get(name) is not None), ("", None))


def unread_labels(batch: Batch) -> list[str]:
    """Return the names of entries that hold labels of a kind that no comparison reads."""
    return [name for name in _UNREAD if isinstance(batch, Mapping) and batch.get(name) is not None]


def targets_of(labels: Any, name: str, values: Tensor) -> Tensor:
    """Return labels as the targets of logits."""
    samples, positions, classes = values.shape
    what = f"{samples} samples of {positions} predictions among {classes} classes"
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"{name} must be whole numbers, to be compared with logits of {what}. Got {kind}.")
    if labels.shape not in {(samples, positions), *([(samples,)] if positions == 1 else [])}:
        raise InputError(
            f"{name} of shape {tuple(labels.shape)} do not fit the model's logits, {what}. Leave them out, or "
            "give one for each prediction."
        )
    targets = labels.to(values.device, torch.int64).reshape(samples, positions)
    wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= classes))]
    if len(wrong):
        raise InputError(
            f"{name} hold {int(wrong[0])}, and the model's logits know the classes 0 to {classes - 1} "
            f"({IGNORED} counts nowhere)."
        )
    return targets


def next_tokens(ids: Tensor, real: Tensor) -> Tensor:
    """Return the token after each one; nothing after the last, and nothing to or from padding."""
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:].where(real[:, 1:] & real[:, :-1], IGNORED)
    return targets


def moved_by_one(module: nn.Module, labels: Tensor, name: str, ids: Tensor | None, causal: bool) -> bool:
    """Tell whether labels are the tokens themselves, so that each is right one position earlier."""
    known = type(module).__module__.startswith("transformers.")
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    if known and type(module).__name__.endswith(_NEXT_TOKEN):
        return True  # the library moves them itself
    if not causal or ids is None or labels.shape != ids.shape:
        return causal and known
    counted, ids = labels != IGNORED, ids.to(labels.device)
    if bool((labels == ids)[counted].all()):
        return True
    if bool((labels[:, :-1] == ids[:, 1:])[counted[:, :-1]].all()):
        return False
    if known:
        return True
    raise InputError(
        f"{name} are neither the tokens of the inputs nor the tokens after them, and the model predicts the next "
        "token: nothing tells to which position they belong. Leave them out."
    )


def losses_of(output: Any, values: Tensor, targets: Tensor) -> tuple[float, list[float], float] | None:
    """Return a model's own loss, the mean cross-entropies that it may be, and by how much these may differ."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        return None
    moved = next_tokens(targets, torch.ones_like(targets, dtype=torch.bool))
    own, rounding = float(loss), max(1e-3, 4 * torch.finfo(loss.dtype).eps)
    return own, [_cross_entropy(values, each) for each in (targets, moved)], rounding * max(1.0, abs(own))


def _cross_entropy(values: Tensor, targets: Tensor) -> float:
    """Mean over targets, sample by sample: logits over a vocabulary are large."""
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    sums = [
        F.cross_entropy(each.to(kind), own, ignore_index=IGNORED, reduction="sum")
        for each, own in zip(values, targets, strict=True)
    ]
    return float(torch.stack(sums).double().sum() / (targets != IGNORED).sum())
