"""A model's output on a batch: a distribution over classes or tokens, or a representation; and its targets."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.adapters.torch_functions import hooked_alone
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, real_tokens
from semdiag.capturing.inputs import AS_THEY_ARE, tokeniser_of
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.censored import predicted_classes
from semdiag.mathematics.paper_stability import truncations
from semdiag.mathematics.score_strips import Scores
from semdiag.measuring.calls.counted_rows import CountedRows
from semdiag.measuring.training_runs import TokenTables, token_ids
from semdiag.measuring.words import counted
from semdiag_files import InputError
from semdiag_models import Encoder

IGNORED = -100  # as a target: no prediction counts here, as in torch's cross-entropy
_NAMES = ("labels", "label", "targets", "target")
_UNREAD = ("start_positions", "end_positions", "next_sentence_label", "class_labels", "mask_labels")
_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")  # ends of the names of classes whose labels are moved by one


def _given_labels(module: nn.Module, batch: Batch) -> tuple[str, Any]:
    """Return the labels among a model's inputs and their name; an empty name and None if there are none."""
    named = dict(batch) if isinstance(batch, Mapping) else {}
    if isinstance(batch, tuple | list):
        with suppress(TypeError, ValueError):  # a forward without a signature
            named = dict(zip(inspect.signature(module.forward).parameters, batch, strict=False))
    return next(((name, named[name]) for name in _NAMES if named.get(name) is not None), ("", None))


def _check_logits(has_logits: bool, name: str, module: nn.Module, headless: bool) -> None:
    if not has_logits:
        without_head = " (without --head none)" if headless else ""
        raise InputError(
            f"{name} are given, but {type(module).__name__} returns no logits to compare them with. Leave them "
            f"out, or name the model with its head{without_head}."
        )


def _unread_labels(batch: Batch) -> list[str]:
    """Return the names of labels among a model's inputs that are of no known kind."""
    return [name for name in _UNREAD if isinstance(batch, Mapping) and batch.get(name) is not None]


def _targets_of(labels: Any, name: str, values: Tensor) -> Tensor:
    samples, positions, classes = values.shape
    logits_in_words = (
        f"{counted(samples, 'sample')} of {counted(positions, 'prediction')} among {classes:,} classes"
    )
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(
            f"{name} must be whole numbers, to be compared with logits of {logits_in_words}. Got {kind}."
        )
    if labels.shape not in {(samples, positions), *([(samples,)] if positions == 1 else [])}:
        raise InputError(
            f"{name} of shape {tuple(labels.shape)} do not fit the model's logits, {logits_in_words}. Leave them "
            "out, or give one for each prediction."
        )
    targets = labels.to(values.device, torch.int64).reshape(samples, positions)
    outside = targets[(targets != IGNORED) & ((targets < 0) | (targets >= classes))]
    if len(outside):
        raise InputError(
            f"{name} hold {int(outside[0])}, and the model's logits know the classes 0 to {classes - 1} "
            f"({IGNORED} counts nowhere)."
        )
    return targets


def _next_tokens(ids: Tensor, real: Tensor) -> Tensor:
    """Return the token after each one; nothing after the last, and nothing to or from padding."""
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:].where(real[:, 1:] & real[:, :-1], IGNORED)
    return targets


def _moved_by_one(module: nn.Module, labels: Tensor, name: str, ids: Tensor | None, causal: bool) -> bool:
    """Tell whether labels are the tokens themselves, so that each is right one position earlier."""
    of_transformers = type(module).__module__.startswith("transformers.")
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    if of_transformers and type(module).__name__.endswith(_NEXT_TOKEN):
        return True  # the library moves them itself
    if not causal or ids is None or labels.shape != ids.shape:
        return causal and of_transformers
    has_label = labels != IGNORED
    ids = ids.to(labels.device)
    if bool((labels == ids)[has_label].all()):
        return True
    if bool((labels[:, :-1] == ids[:, 1:])[has_label[:, :-1]].all()):
        return False
    if of_transformers:
        return True
    raise InputError(
        f"{name} are neither the tokens of the inputs nor the tokens after them, and the model predicts the next "
        "token: nothing tells to which position they belong. Leave them out."
    )


def _cross_entropy(values: Tensor, targets: Tensor) -> float:
    """Mean over targets, sample by sample: logits over a vocabulary are large."""
    sums = [
        F.cross_entropy(logits.to(_kind(values)), classes, ignore_index=IGNORED, reduction="sum")
        for logits, classes in zip(values, targets, strict=True)
    ]
    return float(torch.stack(sums).double().sum() / (targets != IGNORED).sum())


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
        with TokenTables(ids) as looked_up:
            self.output = output = run(batch)
        values, named = _values(output, batch)
        headless = not named and _says_headless(module)
        # name or index of the input ids whose next token it predicts
        self._predicted = None if headless else self._next_token_ids(batch, ids, looked_up.tables, values, run)
        self.causal = self._predicted is not None
        name, targets = self._labels(batch, labels)
        has_logits = isinstance(module, Encoder) or named or self.causal
        if targets is not None and not has_logits:
            has_logits = not headless and not isinstance(output, Mapping)
            _check_logits(has_logits, name, module, headless)
        self._by_token = has_logits and self._is_one_a_token(values, targets, ids.values())
        self.reason = self._no_distribution(values, targets) if has_logits else ""
        self.distribution = has_logits and not self.reason
        self.not_compared = "" if self.distribution else _not_compared(output)
        self.unread = _unread_labels(batch)
        self._moved: bool | None = None  # whether labels are the tokens themselves, if the model's own loss tells
        self.loss = self._compare_loss(output, batch) if self.distribution and labels is None else ""

    def _next_token_ids(
        self,
        batch: Batch,
        ids: Mapping[str | int, Tensor],
        tables: Mapping[str | int, Sequence[Tensor]],
        values: Tensor,
        run: Any,
    ) -> str | int | None:
        """Return name or index of the input ids whose next token the output predicts; None if there are none."""
        for place, tables_of_place in tables.items():
            sizes = {len(table) for table in tables_of_place}
            if values.ndim != 3 or values.shape[:2] != ids[place].shape or values.shape[2] not in sizes:
                continue
            if _looks_back(batch, ids[place], values, self._counted(batch, values), min(sizes), run):
                return place
        return None

    def _labels(self, batch: Batch, labels: Tensor | None) -> tuple[str, Any]:
        """Return the labels, those that are given apart or those among a model's inputs, and their name."""
        return _given_labels(self._module, batch) if labels is None else ("labels", labels)

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

    def _compare_loss(self, output: Any, batch: Batch) -> str:
        """Learn from a model's own loss to which positions labels belong; return how it is another, if it is."""
        name, labels = _given_labels(self._module, batch)
        if labels is None:
            return ""
        values, _ = _values(output, batch)
        values = values if values.ndim == 3 else values.reshape(len(values), 1, -1)
        targets = _targets_of(labels, name, values)
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            return ""
        if not math.isfinite(value := float(loss)):
            return ""
        next_targets = _next_tokens(targets, torch.ones_like(targets, dtype=torch.bool))
        losses = [_cross_entropy(values, each) for each in (targets, next_targets)]
        rounding = max(1e-3, 4 * torch.finfo(loss.dtype).eps) * max(1.0, abs(value))
        there, earlier = (abs(each - value) for each in losses)
        if there <= rounding or earlier <= rounding:
            self._moved = None if there == earlier else earlier < there  # the nearer of two that are near
            return ""
        places = ("", " (each label one position earlier)")
        texts = " or ".join(f"{x:.4g}{at}" for x, at in zip(losses, places, strict=True) if math.isfinite(x))
        return f"on the first batch the model's own loss is {value:.4g}, and that of its logits {texts}"

    def _targets(self, batch: Batch, values: Tensor, labels: Tensor | None, counted: Tensor) -> Tensor | None:
        ids = None if self._predicted is None else token_ids(batch).get(self._predicted)
        name, given_targets = self._labels(batch, labels)
        if given_targets is None:
            return None if ids is None else _next_tokens(ids, counted)
        targets = _targets_of(given_targets, name, values)
        moved = self._moved
        if moved is None:
            moved = _moved_by_one(self._module, targets, name, ids, self.causal)
        return _next_tokens(targets, torch.ones_like(targets, dtype=torch.bool)) if moved else targets


def difference(end: Tensor, start: Tensor) -> Tensor:
    """Return end − start; 0 where both are the same infinity."""
    return (end - start).masked_fill(end == start, 0)


def _values(output: Any, batch: Batch) -> tuple[Tensor, bool]:
    """Return the output's tensor, samples first, and whether it is called logits."""
    named = isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor)
    values = output["logits"] if named else output
    if not isinstance(values, Tensor):
        values = next(iter(_comparable(output).values()), None)
    if values is None or not values.is_floating_point():
        kind = type(output).__name__ if values is None else f"tensor of {str(values.dtype).removeprefix('torch.')}"
        raise TypeError(f"its output, a {kind}, holds no tensor of floating-point numbers")
    samples = batching.samples_of(batch)
    if samples in values.shape[:1]:
        return values, named
    if samples in values.shape[1:2]:  # sequence first
        return values.transpose(0, 1), named
    raise TypeError(f"its output, of shape {tuple(values.shape)}, has no axis of the batch's samples, {samples}")


def _comparable(output: Any) -> dict[str, Tensor]:
    """Return the tensors of an output of several that may be representations, by name or index."""
    several = enumerate(output, 1) if isinstance(output, tuple | list) else ()
    parts = output.items() if isinstance(output, Mapping) else ((f"number {place}", x) for place, x in several)
    return {str(n): x for n, x in parts if isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2}


def _not_compared(output: Any) -> str:
    """Return which tensors of an output are left out, if the first alone is compared."""
    names = [*_comparable(output)]
    return f"{names[0]} alone is compared, not {', '.join(names[1:])}" if len(names) > 1 else ""


def _predicts_pixels(module: nn.Module) -> bool:
    """Return whether a model of transformers fills in parts of an image (ViTMAE, VideoMAE)."""
    kind = type(module)
    named = kind.__module__.startswith("transformers.") and kind.__name__.endswith("ForPreTraining")
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
    earlier = real & ~later
    if not earlier.any():
        return False
    changed = ids.clone()
    changed[at] = torch.where(later[0], (ids[at] + 1) % tokens, ids[at])
    changed_batch = batching.with_tensor(batch, ids, changed)
    alone = batching.samples_of(batch) > 1 and not isinstance(batch, tuple | list)
    try:
        if alone:  # two forwards of one sample cost less than one of all; their rounding differs
            sample = _sample(batch, at)
            values = _values(run(sample), sample)[0]
            sample = _sample(changed_batch, at)
            output = _values(run(sample), sample)[0]
        else:
            values = values[at : at + 1]
            output = _values(run(changed_batch), changed_batch)[0][at : at + 1]
    except Exception:  # the model may reject these inputs, which are not the user's: then the test is void
        return False
    output_changes = difference(output, values).abs().amax(-1)  # (1, L)
    sizes = values[real].abs()
    noise = _SAME * sizes.where(sizes.isfinite(), 0).max()  # logits of what never follows are -inf
    return bool(output_changes[earlier].max() <= noise) and bool(output_changes[later].max() > noise)


def _sample(batch: Batch, at: int) -> Batch:
    return next(islice(batching.each(batch, 1), at, None))


_EVERY = 8  # outputs are computed at every k up to it
_STEP = 4  # and then at every fourth
_HALVES = torch.float16, torch.bfloat16


def output_ks(largest: int, named: Sequence[int]) -> tuple[int, ...]:
    """Return the k at which outputs are computed: every one up to 8, every fourth, and those that are run."""
    ks = {k for k in range(1, largest + 1) if k <= _EVERY or k % _STEP == 0}
    return tuple(sorted({*ks, *(k for k in named if k <= largest), largest}))


class Streams:
    """The residual stream of an encoder of semdiag_models, and the matrices by which its heads write into it."""

    def __init__(self) -> None:
        self._out: list[nn.Linear] = []
        self._inputs: dict[int, Tensor] = {}

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Follow the stream of an encoder that runs inside the context; does nothing for other models."""
        blocks = module.blocks if isinstance(module, Encoder) and hooked_alone(module) else ()
        self._out = [module.attention(layer).out for layer in range(len(blocks))]  # type: ignore[operator]
        with ExitStack() as stack:
            for layer, block in enumerate(blocks):
                hook = partial(self._keep, layer)
                stack.callback(block.register_forward_pre_hook(hook).remove)
            yield

    def _keep(self, layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._inputs[layer] = inputs[0]

    def of(self, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        """Return the norms of the stream that attention has been added to, (B, L), and W_o, (H, D, d)."""
        if not self._out:
            return None
        out = self._out[call.layer]
        added = nn.functional.linear(call.mixed.transpose(1, 2).flatten(2), out.weight, out.bias)
        matrices = out.weight.T.reshape(call.mixed.shape[1], -1, len(out.weight))
        return (self._inputs[call.layer] + added).norm(dim=-1), matrices


@torch.no_grad()
def output_changes(
    rows: CountedRows, ks: Sequence[int], stream: tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return what truncation at each k changes in the head output of every row, and the first key's part."""
    call = rows.call
    stats = rows.statistics
    q, k = ((x.float() if x.dtype in _HALVES else x) for x in (call.q, call.k.contiguous()))
    masks = call.allowed, call.bias, call.softcap, call.causal, call.first_query, call.queries, rows.places
    first = rows.keys.to(torch.uint8).argmax(-1)  # (B, H)
    of_call = truncations(
        Scores(q, k, call.scale, *masks), call.v, (stats.top, stats.top_keys), stats.log_sum_exp, ks, first,
        call.sinks, None if stream is None else stream[1],
    )  # fmt: skip
    ranked = stats.top_keys == first[..., None, None]
    rank = torch.where(ranked.any(-1), ranked.to(torch.uint8).argmax(-1), stats.top_keys.shape[-1])
    changes = {"head_change": of_call.change / of_call.size[..., None], "others": of_call.log_other_keys}
    changes["first_rank"] = rank
    if stream is not None and of_call.projected is not None:
        size = stream[0][:, None].expand(call.q.shape[:3])
        size = size if rows.places is None else size.gather(2, rows.places.clamp(min=0))
        changes["stream_change"] = of_call.projected / size[..., None]
    return changes


_AT_ONCE = 2**19  # entries: they fit the cache, and the log-probabilities of a whole batch are never held


def position_terms(before: Answers, after: Answers) -> dict[str, Tensor]:
    """Return each position's contribution to its sample's sums, (B, P)."""
    counted = before.counted
    zeros = torch.zeros(counted.shape, dtype=torch.int64, device=counted.device)
    values = dict.fromkeys(("targets", "correct", "predictions", "changed", "loss", "divergence"), zeros)
    if not (before.distribution and after.distribution):
        return values
    has_target = torch.zeros_like(counted) if before.targets is None else before.targets != IGNORED
    true_classes = zeros if before.targets is None else before.targets.where(has_target, 0)
    parts = []
    for one, two, targets in _strips(before.values, after.values, true_classes):
        first, second = (x.to(_kind(x)).log_softmax(-1) for x in (one, two))
        loss = -second.gather(-1, targets[:, None])[:, 0].double()
        choice_before = predicted_classes(first)
        choice_after = predicted_classes(second)
        likely = first.exp()
        terms = first.sub_(second).mul_(likely)
        divergence = terms.sum(-1, dtype=torch.float64)
        if divergence.isnan().any():  # 0 times ∞; any other term of probability 0 is 0 already
            divergence = terms.masked_fill_(likely == 0, 0).sum(-1, dtype=torch.float64)
        parts.append((choice_before, choice_after, divergence, loss))
    choice_before, choice_after, divergence, loss = (
        torch.cat(each).view(counted.shape) for each in zip(*parts, strict=True)
    )
    values["predictions"] = counted.long()
    values["changed"] = ((choice_before != choice_after) & counted).long()
    values["divergence"] = divergence.masked_fill(~counted, 0)
    if before.targets is not None:
        values["targets"] = has_target.long()
        values["correct"] = ((choice_after == true_classes) & has_target).long()
        values["loss"] = loss.masked_fill(~has_target, 0)
    return values


def output_change(before: Answers, after: Answers) -> Tensor:
    """Return the relative change ‖after − before‖ / ‖before‖ without entries that stay infinite: (B,)."""
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)
    parts = []
    for one, two in _strips(before.values, after.values):
        change = norm(two - one)
        size = norm(one)
        if not (change.isfinite().all() and size.isfinite().all()):
            stays = one.isinf() & (one == two)
            change = norm(difference(two, one).masked_fill(stays, 0))
            size = norm(one.masked_fill(stays, 0))
        parts.append((change, size))
    counted = before.counted
    change, size = (
        torch.linalg.vector_norm(torch.cat(each).view(counted.shape).masked_fill(~counted, 0), dim=-1)
        for each in zip(*parts, strict=True)
    )
    relative: Tensor = (change / size).masked_fill(change == 0, 0)
    return relative.masked_fill(relative.isnan(), math.inf).masked_fill(~counted.any(1), math.nan)


def _kind(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _strips(values: Tensor, *alike: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few positions at a time of (B, P, C) and of tensors with the same positions."""
    flat = [x.reshape(-1, *x.shape[2:]) for x in (values, *alike)]
    size = max(1, _AT_ONCE // max(1, values.shape[-1]))
    for at in range(0, max(1, len(flat[0])), size):
        yield tuple(x[at : at + size] for x in flat)


_SHARE = 0.15


def masked_language(
    loaded: LoadedModel, batches: list[Batch], seed: int, remark: Callable[[str, str], None]
) -> list[Batch]:
    """Mask some tokens of a masked-language model's inputs, so that its loss is known."""
    named = type(loaded.module).__name__.endswith("ForMaskedLM")
    masked_batches = [dict(batch) for batch in batches if isinstance(batch, Mapping)]
    unlabelled = all("input_ids" in batch and "labels" not in batch for batch in masked_batches)
    plain = unlabelled and len(masked_batches) == len(batches)
    if loaded.source != "hugging face" or not named or not plain:
        return batches
    try:
        tokenise = tokeniser_of(Path(loaded.path), loaded, AS_THEY_ARE)
    except InputError:
        return batches
    for number, batch in enumerate(masked_batches):
        ids: Tensor = batch["input_ids"]
        masked = tokenise.mask(ids.cpu(), seed + number, _SHARE)
        if masked is None:
            return batches
        batch["input_ids"], batch["labels"] = (x.to(ids.device) for x in masked)
    text = f"run with {_SHARE:.0%} of the tokens masked (seed {seed}): the loss is that of these tokens"
    remark(text, "tokens-masked")
    return [*masked_batches]
