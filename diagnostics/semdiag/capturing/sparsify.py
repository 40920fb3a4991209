"""Real masks in any model: in all attention that capture sees, queries keep only the keys that a rule selects."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from semdiag.capturing import masked_attention
from semdiag.capturing.adapters.hugging_face import IGNORED
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_calls import take_off_hooks, watch_attention
from semdiag.capturing.audit import Audit, Remark, Skipped
from semdiag.capturing.call_strips import count_true, number_of_keys
from semdiag.capturing.choices import SharedChoices
from semdiag.capturing.kept_keys import Choice, all_kept
from semdiag.capturing.loading import imported_function, names_factory
from semdiag.capturing.masked_attention import as_computed, attended, out_of_memory, why_dense
from semdiag.capturing.padding import Padding
from semdiag.capturing.patches import is_followed, undone
from semdiag.capturing.private_parts import OWN_GRADIENTS, checkpointed, own_backward
from semdiag.capturing.provenance.softmaxes import NO_VALUES
from semdiag.capturing.recording import Inputs, MaskedOutput, outside_all_modes
from semdiag.capturing.rules import Keep, RandomK, SkipTiles, TopK, TopP, Window, check_keep, rule_for
from semdiag_files import InputError

_ELSEWHERE = "the forward pass runs it in another thread, where no mask can reach it"
__all__ = ["Keep", "Masked", "RandomK", "TopK", "TopP", "Window", "sparsify"]


class _Counts(NamedTuple):
    """Numbers of kept keys for one module and occurrence, by head."""

    layer: int
    calls: int
    sums: Tensor  # (3, H): queries with a key, their kept keys, and their keys
    least: Tensor
    most: Tensor


@dataclass
class Masked:
    """What :func:`sparsify` did; it fills while the model runs."""

    audit: Audit = field(default_factory=Audit)  # what was seen, also what looks like attention and was not masked
    _real: list[tuple[int, Tensor]] = field(default_factory=list)  # numbers of queries, and whether all are real
    _counts: dict[tuple[str, int], _Counts] = field(default_factory=dict)
    _last: tuple[Tensor, _Counts] | None = None
    _bare: dict[str, list[Tensor]] = field(default_factory=dict)  # by module, rows that would keep no key
    _close: list[Tensor] = field(default_factory=list)  # numbers of rows whose choice rounding could change

    @property
    def calls(self) -> int:
        """Number of calls that got a mask, including those in which the rule dropped no key."""
        return sum(counts.calls for counts in self._counts.values())

    @property
    def ran(self) -> bool:
        """Whether the model ran, as far as one can tell."""
        return bool(self.calls or self.audit.skipped or self.audit.captured)

    @property
    def unmasked(self) -> list[Skipped]:
        """What looks like attention and got no mask, or got one and is no attention; only with ``partial``."""
        skipped = list(self.audit.skipped)
        masked: Counter[str] = Counter()
        for (module, _), counts in self._counts.items():
            masked[module] += counts.calls
        for entry, times in self.audit.skipped.items():
            if entry.reason in (IGNORED, NO_VALUES):
                masked[entry.module] -= times
            elif entry.reason == _ELSEWHERE:
                masked[entry.module] += times
        if self.audit.captured.total() <= masked.total():
            return skipped
        reason = "captured, but it takes no mask here"
        return skipped + [
            Skipped(c.module, c.mechanism, reason) for c, n in self.audit.captured.items() if n > masked[c.module]
        ]

    @property
    def padded(self) -> set[int]:
        """Numbers of queries of calls with padding."""
        return {length for length, real in self._real if not bool(real)}

    @property
    def totals(self) -> tuple[int, int]:
        """Kept keys and all keys, summed over heads, calls and queries that are not padding."""
        sums = (c.sums.sum(1).cpu() for c in self._counts.values())
        _, kept_keys, keys = sum(sums, torch.zeros(3, dtype=torch.int64)).tolist()
        return kept_keys, keys

    @property
    def kept(self) -> pd.DataFrame:
        """One row per module, occurrence and head: queries with a key; least, most, mean kept keys; mean keys."""
        rows = []
        for (module, occurrence), c in self._counts.items():
            numbers = zip(*c.sums.tolist(), c.least.tolist(), c.most.tolist(), strict=True)
            for head, (queries, kept_keys, keys, least, most) in enumerate(numbers):
                place = {"layer": c.layer, "module": module, "occurrence": occurrence, "head": head}
                extremes = {"queries": queries, "least": least if queries else 0, "most": most}
                means = {"kept": kept_keys / max(1, queries), "keys": keys / max(1, queries)}
                rows.append(place | extremes | means)
        return pd.DataFrame(rows)

    def _add(self, call: AttentionCall, number: Tensor, keys: Tensor) -> None:
        """Add the numbers of kept and of all keys of each query; they stay on their device until they are read."""
        if call.queries is not None:
            self._real.append((call.q.shape[2], call.queries.all()))
        if self._last is not None and self._last[0] is number and call.queries is None:  # calls that are alike
            new = self._last[1]._replace(layer=call.layer)
        else:
            real = call.counted & (keys > 0)
            rows, kept_keys, keys = (
                (x * real).movedim(1, 0).flatten(1) for x in (real, number, keys)
            )  # (H, B·Lq)
            least = kept_keys.where(rows, torch.iinfo(number.dtype).max).amin(1)
            sums = torch.stack([x.sum(1) for x in (rows, kept_keys, keys)])
            new = _Counts(call.layer, 1, sums, least, kept_keys.amax(1))
            self._last = (number, new) if call.queries is None else None
        place = call.module, call.occurrence
        if (old := self._counts.get(place)) is not None:
            least = torch.minimum(old.least, new.least)
            most = torch.maximum(old.most, new.most)
            new = _Counts(old.layer, old.calls + 1, old.sums + new.sums, least, most)
        self._counts[place] = new

    def _count_bare(self, call: AttentionCall, bare: Tensor | None) -> None:
        """Count the queries of a call that would keep none of their keys; None: there is none."""
        if bare is not None:
            self._bare.setdefault(call.module, []).append((bare & call.counted).sum())

    def _remark_rows(self) -> None:
        """Remark rows in which a rule meant something else, or rounding could, and kernels that failed."""
        remarks = self.audit.remarks
        close = sum(map(int, self._close))
        if close:
            text = "the last kept and the first dropped score are within rounding of each other"
            text = f"in {close:,} rows, {text}: there, the threshold may have kept the other one"
            remarks[Remark("", text)] += 1
        for module, numbers in self._bare.items():
            rows = sum(map(int, numbers))
            if rows:
                text = f"{rows:,} rows (queries of a head) would keep none of their keys, and keep all of them"
                remarks[Remark(module, text)] += 1
        for reason in masked_attention.FAILED[1:]:
            remarks[Remark("", f"FlexAttention was not used ({reason})")] += 1


_TILE = re.compile(r"tile-(\d{1,5})x(\d{1,5})(?:-(.+))?")
_SKIP = re.compile(r"skip-(\d+(?:\.\d+)?|nan)(?:-(\d{1,5})x(\d{1,5}))?")
ENGINE_KINDS = "tile-64x64, tile-128x64-quest (or -mean, -antidiagonal, -last, -module:function), skip-8"


def engine_rule(kind: str, k: int) -> TopK | SkipTiles | None:
    """Return the rule of a kind of engines; None if k is less than a block. ``module:function`` is imported."""
    if skip := _SKIP.fullmatch(kind):
        return SkipTiles(float(skip[1]), int(skip[2] or 64), int(skip[3] or 64))
    tile = _TILE.fullmatch(kind)
    if tile is None or min(int(tile[1]), int(tile[2])) < 1:
        raise InputError(f"There is no kind of sparse attention {kind!r}. Kinds of engines: {ENGINE_KINDS}.")
    query_block = int(tile[1])
    block = int(tile[2])
    name = tile[3]
    estimate = imported_function(name) if name and names_factory(name) else name
    return TopK(k // block, block=block, query_block=query_block, estimate=estimate) if k >= block else None


@contextmanager
def sparsify(model: nn.Module, keep: Keep, *, partial: bool = False) -> Iterator[Masked]:
    """Run a model with real masks: in all its attention, each query attends only to the keys that a rule keeps.

    p_i = softmax of z_i over K_i ⊆ A_i, zero elsewhere, where the rule chooses K_i from the scores z_i of the
    masked model itself: a mask in one layer moves the scores of the next. Where the rule drops no key, the model
    runs unchanged, to the last bit (except on fused and compiled paths: see
    :func:`~semdiag.capturing.attention_calls.watch_attention`). Gradients are those of the masked model; the
    choice of keys has none. Nothing is left behind. :func:`semdiag.capture` and :class:`semdiag.Monitor`, opened
    around or inside this context, see what the masked model attends to.

    Cost: see docs/performance.md. Fused attention is replaced by one that holds no mask; where another watch has
    to see the mask, a bias is learned, weights are dropped at random, or attention is written by hand, the mask is
    a tensor of B · H · Lq · Lk bytes. On a GPU the audit counts rows in which rounding could change the choice.

    Source: the masks are those of docs/theory.md#quantities (S_i); sinks as in Xiao et al. 2023. Deviation: none.

    Args:
        model: any module that capture understands. What runs outside it stays unmasked.
        keep: :class:`TopK`, :class:`TopP`, :func:`Window`, :class:`RandomK`; or a dictionary of them by layer,
            module name, or (module name, occurrence), which :func:`semdiag.read_budget` returns.
        partial: whether to go on if some attention cannot be masked; ``unmasked`` then lists it.

    Yields:
        Record of the masking: ``kept`` is a table of kept keys by layer and head.

    Raises:
        InputError: (in the forward pass, or at the end of the context) unless ``partial``, if some attention
            cannot be masked; if there is none; in another thread; under activation checkpointing, or with a
            gradient in an ``autograd.Function``; if a window or sinks need positions that are unknown; if ``keep``
            is no rule or does not fit the model; or if memory runs out.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> model = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=6, blocks=1, heads=2)).eval()
        >>> with sparsify(model, keep=TopK(3)) as masked:
        ...     _ = model(torch.tensor([[0, 1, 1, 0, 1, 0]]))
        >>> masked.kept[["head", "least", "most", "keys"]].to_numpy().tolist()
        [[0.0, 3.0, 3.0, 6.0], [1.0, 3.0, 3.0, 6.0]]
    """
    check_keep(keep)
    masking = _Masking(model, keep, partial)
    masked = masking.masked
    try:
        with undone() as stack:
            stack.enter_context(OWN_GRADIENTS.held())
            stack.enter_context(masking.padding.watched())
            stack.enter_context(undone(lambda: take_off_hooks(None, masking.before, masking.after)))
            register_module_forward_pre_hook(masking.before)
            masked.audit = stack.enter_context(watch_attention(model, lambda call: None, mask=masking.mask))
            register_module_forward_hook(masking.after)
            yield masked
    except torch.OutOfMemoryError as error:
        raise InputError(f"The masked model needs more memory: {out_of_memory(error)}") from error
    finally:
        masked._remark_rows()
    if masked.ran:
        masking.check()


class _Masking:
    """Masks the calls of a model in the thread that opened it."""

    def __init__(self, model: nn.Module, keep: Keep, partial: bool) -> None:
        self.masked = Masked()
        self.padding = Padding(model)
        self._model = model
        self._keep = keep
        self._partial = partial
        self._choices = SharedChoices(keep)
        self._thread = threading.get_ident()
        self._names = {id(module): name for name, module in model.named_modules()}
        # The same objects are registered and removed.
        self.before = self._refuse_threads
        self.after = self._check_model

    def mask(self, call: AttentionCall, inputs: Inputs | None) -> Tensor | MaskedOutput | None:
        """Return a call's kept keys, or its output with them; None where no key is dropped."""
        _refuse_other_gradients(call)
        if threading.get_ident() != self._thread:
            self.masked.audit.skipped[Skipped(call.module, call.mechanism, _ELSEWHERE)] += 1
            return None
        reason = None if inputs is None else why_dense(call)
        if inputs is not None and reason is None:
            call, inputs = as_computed(call, inputs)
        with outside_all_modes(call.q.device.type):
            choice = self._choices.choice(rule_for(self._keep, call), call)
            keys = number_of_keys(call)
        if choice.remark is not None:
            self._remark(call, choice.remark)
        output: Tensor | MaskedOutput | None = None
        number: Tensor | None = None
        if inputs is not None and reason is None and not choice.keeps_all:
            output = attended(choice, inputs)
            number = output.number
            if output.close is not None:
                self.masked._close.append(output.close)
        elif not choice.keeps_all:
            if reason is not None:
                self._remark(call, f"its mask is a tensor of queries × keys: {reason}")
            output = _dense_mask(choice)
        with outside_all_modes(call.q.device.type):
            if isinstance(output, Tensor):
                number = count_true(output)
            return output if self._record(call, choice, number, keys) else None

    def _remark(self, call: AttentionCall, text: str) -> None:
        self.masked.audit.remarks[Remark(call.module, text)] += 1

    def _record(self, call: AttentionCall, choice: Choice, number: Tensor | None, keys: Tensor) -> bool:
        """Record the numbers of kept keys; return whether one is dropped: else the model runs as it is."""
        call = self.padding.marked(call, Audit())
        self.masked._add(call, keys if number is None else number, keys)
        self.masked._count_bare(call, choice.bare)
        return number is not None and (call.q.device.type != "cpu" or bool((number < keys).any()))

    def _refuse_threads(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        if id(module) not in self._names:
            return
        if threading.get_ident() != self._thread and not is_followed():
            name = self._names[id(module)] or "The model"
            raise InputError(f"{name} runs in another thread, where no mask can reach it.")
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise InputError("nn.DataParallel runs the model in other threads: sparsify the module inside it.")

    def _check_model(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if module is self._model:
            self.check()

    def check(self) -> None:
        """Refuse a model without attention or, unless partial, one whose attention was not all masked."""
        masked = self.masked
        if not masked.ran:
            raise InputError("No softmax attention was found in the model: there is nothing to mask.")
        if self._partial:
            return
        missed = [f"{s.module or 'the model itself'}: {s.operation} ({s.reason})" for s in masked.unmasked]
        if missed:
            raise InputError(
                "Some of the model's attention cannot be masked, or a mask would hit something else. "
                f"{'; '.join(missed)}. partial=True masks the rest, which answers a different question."
            )


def _refuse_other_gradients(call: AttentionCall) -> None:
    """Refuse a call whose backward pass would be that of another model."""
    if checkpointed():
        raise InputError(
            f"{call.module} runs under activation checkpointing, which would run it again in the backward "
            "pass, possibly without the mask. Turn checkpointing off (Hugging Face models: "
            "gradient_checkpointing_disable())."
        )
    function = own_backward()
    if function is not None:
        raise InputError(
            f"{call.module or 'The model itself'} attends in {function}, an autograd.Function, whose "
            "own backward pass knows no mask: its gradients would be those of another model. Run it under "
            f"torch.no_grad(), or without {function}, so that torch finds the gradients."
        )


def _dense_mask(choice: Choice) -> Tensor | None:
    """Return the kept keys of a call, (B, H, Lq, Lk) bool; None where no key is dropped."""
    masked_attention.check_memory(choice.call)
    with outside_all_modes(choice.call.q.device.type):
        masks = all_kept(choice)
    return None if masks is None else masks[0]
