"""A model's output on a batch: a distribution over classes or tokens, or a representation; and its targets."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.token_masks import real_tokens
from semdiag.measuring.token_tables import TokenTables, token_ids
from semdiag.questions.k_sweep.measure.targets import (
    given_labels,
    losses_of,
    moved_by_one,
    next_tokens,
    targets_of,
    unread_labels,
)
from semdiag_models import Encoder, InputError

_NO_CLASSES = "regression", "multi_label_classification"  # problem types whose logits are not a distribution
_SAME = 1e-4  # relative to the largest logit: rounding at a position that sees no changed token


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's output on a batch of B samples at P positions each."""

    values: Tensor  # (B, P, C) logits, or (B, P, D) representations
    distribution: bool  # whether a softmax over the last axis gives a distribution; else these are representations
    targets: Tensor | None  # (B, P) int64, ``IGNORED`` where unknown; None if all are
    counted: Tensor  # (B, P) bool, positions that are not padding

    @property
    def classes(self) -> int:
        """Of the distribution; 0 of representations."""
        return self.values.shape[-1] if self.distribution else 0


class Reader:
    """Reads a model's outputs; learns how from its output on a first batch."""

    def __init__(self, module: nn.Module, batch: Batch, labels: Tensor | None, run: Any) -> None:
        self._module = module
        ids = token_ids(batch)
        with TokenTables(ids) as seen:
            self.output = output = run(batch)
        values, named = _values(output, batch)
        headless = not named and _says_headless(module)
        self._predicted: str | int | None = None  # name or index of the input ids whose next token it predicts
        for place, tables in () if headless else seen.tables.items():
            sizes = {len(table) for table in tables}
            fits = values.ndim == 3 and values.shape[:2] == ids[place].shape and values.shape[2] in sizes
            if fits and _looks_back(batch, ids[place], values, self._counted(batch, values), min(sizes), run):
                self._predicted = place
                break
        self.causal = self._predicted is not None
        name, known = given_labels(module, batch) if labels is None else ("labels", labels)
        plain = known is not None and not headless and not isinstance(output, Mapping)
        logits = isinstance(module, Encoder) or named or self.causal or plain
        if known is not None and not logits:
            raise InputError(
                f"{name} are given, but {type(module).__name__} returns no logits to compare them with. Leave "
                f"them out, or name the model with its head{' (without --head none)' * headless}."
            )
        self._by_token = logits and self._is_one_a_token(values, known, ids.values())
        self.reason = self._no_distribution(values, known) if logits else ""
        self.distribution = logits and not self.reason
        self.others = "" if self.distribution else _others(output)
        self.unread = unread_labels(batch)
        self._moved: bool | None = None  # whether labels are the tokens themselves, if the model's own loss tells
        self.loss = self._own_loss(output, batch) if self.distribution and labels is None else ""

    def shape(self, output: Any, batch: Batch) -> tuple[int, ...]:
        """Return the shape of what is read of an output, as :meth:`read` does."""
        return tuple(_values(output, batch)[0].shape)

    def read(self, output: Any, batch: Batch, labels: Tensor | None) -> Answers:
        """Read the output on a batch."""
        values, _ = _values(output, batch)
        if values.ndim != 3:
            values = values[..., None] if self._by_token else values.reshape(len(values), 1, -1)
        counted = self._counted(batch, values)
        if not self.distribution:
            return Answers(values, False, None, counted)
        return Answers(values, True, self._targets(batch, values, labels, counted), counted)

    def _is_one_a_token(self, values: Tensor, labels: Any, ids: Iterable[Tensor]) -> bool:
        """Tell whether logits are one for each token, as of a discriminator, not one for each class."""
        if values.ndim != 2 or all(values.shape != each.shape for each in ids):
            return False
        if isinstance(labels, Tensor) and labels.ndim == 1:
            return False
        return getattr(getattr(self._module, "config", None), "num_labels", None) != values.shape[1]

    def _no_distribution(self, values: Tensor, labels: Any) -> str:
        """Return why a softmax over the last axis of logits is meaningless; empty if it is not."""
        if values.ndim < 2 or values.shape[-1] == 1:
            return "there is one alone, of which a softmax is always 1"
        if values.ndim > 3:
            return f"they have {values.ndim} axes, and nothing tells which is that of the classes"
        if self._by_token:
            return "there is one for each token, not one for each class"
        if _predicts_pixels(self._module):
            return "they are pixels"
        kind = getattr(getattr(self._module, "config", None), "problem_type", None)
        if kind in _NO_CLASSES and not self.causal:
            return f"the problem type of the model is {kind}"
        if isinstance(labels, Tensor) and labels.is_floating_point():
            return "the labels are floating-point numbers, no classes"
        return ""

    def _counted(self, batch: Batch, values: Tensor) -> Tensor:
        real = real_tokens(self._module, batch)
        for name in ("decoder_attention_mask", *real):
            if name in real and real[name].shape == values.shape[:2]:
                return real[name]
        return torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)

    def _own_loss(self, output: Any, batch: Batch) -> str:
        """Learn from a model's own loss to which positions labels belong; return how it is another, if it is."""
        name, given = given_labels(self._module, batch)
        if given is None:
            return ""
        values, _ = _values(output, batch)
        values = values if values.ndim == 3 else values.reshape(len(values), 1, -1)
        losses = losses_of(output, values, targets_of(given, name, values))
        if losses is None or not math.isfinite(losses[0]):
            return ""
        own, ours, rounding = losses
        there, earlier = (abs(each - own) for each in ours)
        if there <= rounding or earlier <= rounding:
            self._moved = None if there == earlier else earlier < there  # the nearer of two that are near
            return ""
        return f"on the first batch the model's own loss is {own:.4g}, and that of its logits {_either(ours)}"

    def _targets(self, batch: Batch, values: Tensor, labels: Tensor | None, counted: Tensor) -> Tensor | None:
        ids = None if self._predicted is None else token_ids(batch).get(self._predicted)
        name, given = given_labels(self._module, batch) if labels is None else ("labels", labels)
        if given is not None:
            targets = targets_of(given, name, values)
            moved = self._moved
            if moved is None:
                moved = moved_by_one(self._module, targets, name, ids, self.causal)
            if moved:
                return next_tokens(targets, torch.ones_like(targets, dtype=torch.bool))
            return targets
        return None if ids is None else next_tokens(ids, counted)


def difference(after: Tensor, before: Tensor) -> Tensor:
    """Return after − before; 0 where both are the same infinity."""
    return (after - before).masked_fill(after == before, 0)


def _either(losses: Sequence[float]) -> str:
    """Name the losses that are known."""
    named = ("", " (each label one position earlier)")
    return " or ".join(f"{x:.4g}{at}" for x, at in zip(losses, named, strict=True) if math.isfinite(x))


def _values(output: Any, batch: Batch) -> tuple[Tensor, bool]:
    """Return the output's tensor, samples first, and whether it is called logits."""
    compared, named = output if isinstance(output, Tensor) else None, False
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        compared, named = output["logits"], True
    if compared is None:
        compared = next(iter(_comparable(output).values()), None)
    if compared is None or not compared.is_floating_point():
        kind = (
            type(output).__name__
            if compared is None
            else f"tensor of {str(compared.dtype).removeprefix('torch.')}"
        )
        raise TypeError(f"its output, a {kind}, holds no tensor of floating-point numbers")
    return _samples_first(compared, batching.samples_of(batch)), named


def _comparable(output: Any) -> dict[str, Tensor]:
    """Return the tensors of an output of several that may be representations, by name or index."""
    if isinstance(output, Mapping):
        parts = {str(name): x for name, x in output.items()}
    else:
        several = output if isinstance(output, tuple | list) else ()
        parts = {f"number {place}": x for place, x in enumerate(several, 1)}
    return {n: x for n, x in parts.items() if isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2}


def _others(output: Any) -> str:
    first, *rest = [*_comparable(output)] or [""]
    return f"{first} alone is compared, not {', '.join(rest)}" if rest else ""


def _samples_first(values: Tensor, samples: int) -> Tensor:
    if samples in values.shape[:1]:
        return values
    if samples in values.shape[1:2]:  # sequence first
        return values.transpose(0, 1)
    raise TypeError(f"its output, of shape {tuple(values.shape)}, has no axis of the batch's samples, {samples}")


def _predicts_pixels(module: nn.Module) -> bool:
    """Return whether a model of transformers fills in parts of an image (ViTMAE, VideoMAE)."""
    named = type(module).__module__.startswith("transformers.") and type(module).__name__.endswith(
        "ForPreTraining"
    )
    return named and str(getattr(module, "main_input_name", "")).startswith("pixel_values")


def _says_headless(module: nn.Module) -> bool:
    """Return whether a model reports no output embedding, as bodies of transformers do."""
    try:
        return module.get_output_embeddings() is None  # type: ignore[operator]
    except (AttributeError, TypeError, NotImplementedError):
        return False


def _looks_back(batch: Batch, ids: Tensor, values: Tensor, real: Tensor, tokens: int, run: Any) -> bool:
    """Return whether changing the second half of the longest sample's tokens changes outputs only there."""
    at = int(real.sum(1).argmax())
    real = real[at : at + 1]
    later = real & (2 * real.cumsum(1) > real.sum(1, keepdim=True))
    before = real & ~later
    if not before.any():
        return False
    changed = ids.clone()
    changed[at] = torch.where(later[0], (ids[at] + 1) % tokens, ids[at])
    other = batching.with_tensor(batch, ids, changed)
    alone = batching.samples_of(batch) > 1 and not isinstance(batch, tuple | list)
    try:
        if alone:  # two forwards of one sample cost less than one of all; their rounding differs
            values = _values(run(one := _sample(batch, at)), one)[0]
            output = _values(run(one := _sample(other, at)), one)[0]
        else:
            values, output = values[at : at + 1], _values(run(other), other)[0][at : at + 1]
    except Exception:  # the model may reject these inputs, which are not the user's: then the test is void
        return False
    moved = difference(output, values).abs().amax(-1)  # (1, L)
    sizes = values[real].abs()
    noise = _SAME * sizes.where(sizes.isfinite(), 0).max()  # logits of what never follows are -inf
    return bool(moved[before].max() <= noise) and bool(moved[later].max() > noise)


def _sample(batch: Batch, at: int) -> Batch:
    """Return one sample of a batch that can be cut."""
    return next(islice(batching.each(batch, 1), at, None))
