"""Find padded queries from the token masks of the surrounding modules, or from the attention's own mask."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from semdiag.capturing import attention_calls as hooks
from semdiag.capturing.attention_call import Args, AttentionCall, Kwargs
from semdiag.capturing.audit import Audit, Remark, failure
from semdiag.capturing.batches import TokenMasks, readings, takes_masks, token_masks
from semdiag.capturing.patches import undone
from semdiag_files import counted


def query_part(mask: Tensor, call: AttentionCall) -> Tensor | None:
    """Return the part of a token mask that belongs to a call's queries."""
    batch, _, length, _ = call.q.shape
    if len(mask) != batch or mask.shape[1] != call.keys_before + call.first_query + length:
        return None
    return mask[:, mask.shape[1] - length :]


def query_part_of_folded(mask: Tensor, call: AttentionCall) -> Tensor | None:
    """Return this part if the batch axis holds several rows per sample; the keys show their order."""
    times = len(call.q) // max(1, len(mask))
    orders = (mask.repeat_interleave(times, 0), mask.repeat(times, 1)) if times > 1 else ()
    pairs = ((rows, query_part(rows, call)) for rows in orders)
    fitting = [part for rows, part in pairs if part is not None and true_of_keys(rows, part, call)]
    return fitting[0] if fitting and all(torch.equal(part, fitting[0]) for part in fitting) else None


def true_of_keys(mask: Tensor, queries: Tensor, call: AttentionCall) -> bool:
    """Return whether the keys are the mask's tokens, and no real query may attend to padding."""
    mask = mask[:, call.keys_before :]
    if mask.shape[1] > call.k.shape[2]:
        return False
    if bool(mask.all()):
        return True
    allowed = call.part().allowed
    if allowed is None:
        return call.selected is not None
    reached = (allowed & queries[:, None, :, None]).any(2).any(1)
    length = mask.shape[1]
    keys = reached.shape[1]
    if not bool((reached[:, :length] & ~mask).any()):
        return True
    return length < keys and bool((reached[:, keys - length :] == mask).all())


def _alike(rows: Tensor) -> bool:
    """Return whether the first two samples are equal up to rounding, which depends on a row's position."""
    first, second = rows[:2]
    return bool(((second - first).abs() <= 16 * torch.finfo(rows.dtype).eps * first.abs().amax()).all())


def is_of_pairs(mask: Tensor, call: AttentionCall) -> bool:
    """Return whether a mask with as many samples as tokens is one of queries by keys, (L, L), as a causal one."""
    allowed = call.part().allowed
    if allowed is None or mask.shape != (call.q.shape[2], call.k.shape[2]) or len(mask) != len(call.q):
        return False
    return not bool((allowed & ~mask).any()) and bool((allowed & ~mask[:, None, None]).any())


def padded_end(call: AttentionCall) -> str | None:
    """Return the end of samples that looks like padding: forbidden to all queries, while its queries see keys."""
    allowed = call.allowed
    batch, _, length, _ = call.q.shape
    if allowed is None or call.first_query or len(allowed) < batch:
        return None
    if not allowed.shape[3] == call.k.shape[2] == length > 1:
        return None
    keys = allowed.any(2, keepdim=True).any(1, keepdim=True)
    if bool(keys.all()):
        return None
    ends = keys.to(torch.int8).diff(dim=3)  # 1 where padding on the left ends, -1 where it begins on the right
    places = [name for name, step in (("last", -1), ("first", 1)) if bool((ends == step).any())]
    if len(places) != 1 or int((ends != 0).sum(3).max()) > 1:
        return None
    past = torch.ones(length, length, dtype=torch.bool, device=allowed.device).tril()
    if not (bool((allowed == keys).all()) or bool((allowed == (keys & past)).all())):
        return None
    attending = allowed.any(3) if not call.causal else call.part().allowed.any(3)  # type: ignore[union-attr]
    if not bool((attending & ~keys[:, :, 0]).any()):
        return None  # padded queries see nothing, and are left out anyway
    return places[0]


def padded_by_own_mask(call: AttentionCall) -> Tensor | None:
    """Return which fully masked queries are padding: those whose key no other query sees."""
    full = call.fully_masked
    batch, _, length, _ = call.q.shape
    if full is None or call.allowed is None or call.first_query + length > call.k.shape[2]:
        return None
    rows = full.any(-1).all(1).expand(batch, length)
    reached = call.part().allowed.any(1).any(1).expand(batch, -1)  # type: ignore[union-attr]
    real = ~rows | reached[:, call.first_query : call.first_query + length]
    return real if not bool(real.all()) and bool(real.any(1).all()) else None


def real_by_own_mask(call: AttentionCall) -> Tensor | None:
    """Return which queries attend like real tokens, in self-attention without any token mask."""
    allowed = call.part().allowed
    batch, _, length, _ = call.q.shape
    if allowed is None or length == 1 or call.first_query + length > call.k.shape[2]:
        return None
    visible = allowed.expand(batch, allowed.shape[1], length, call.k.shape[2]).any(1)
    place = torch.arange(call.first_query, call.first_query + length, device=visible.device)
    real = visible[:, torch.arange(length, device=visible.device), place]
    if not bool((visible == visible[:, :1]).all()):
        everything = visible.all(2)
        everything &= everything.sum(1, keepdim=True) > 1  # a single one: the last query of causal attention
        by_others = (visible & ~everything[:, :, None])[:, :, place].any(1)
        real &= ~everything | by_others
    if call.fully_masked is not None:  # the mask leaves these no key, but others may see their key
        real |= call.fully_masked.any(-1).all(1) & visible.any(1)[:, place]
    return real if bool(real.any(1).all()) else None


# Which queries are real, (B, Lq) bool, and a remark; None for either.
RealQueries = tuple[Tensor | None, str | None]
NOT_APPLIED = "real is not applied here"  # start of a remark
NOT_APPLIED_CODE = "real-not-applied"
OWN_KEY = "queries that may attend to no key, and to which no other query may attend, are taken for padding"
NOT_MASKED = (
    "some samples begin with the padding token and no mask was given: it counts as queries and keys; give "
    "attention_mask"
)
AVERAGED = (
    "a finite constant forbids every key of some real queries: the model then attends to all these keys equally, "
    "and is measured so"
)


class Padding:
    """Follows the token masks that the running modules get."""

    def __init__(self, model: nn.Module, real: Tensor | None = None) -> None:
        self.real = real  # the user's mask, (N, L) bool
        self.fitted = False  # whether it fitted a call
        self._model = model
        self._threads = threading.local()
        self._failed: str | None = None
        self._bare = False  # whether some samples begin with padding that no mask marks
        self._hooks: dict[nn.Module, hooks.Hooks] = {}

    @property
    def _running(self) -> list[TokenMasks | None]:
        """Masks of the running modules of this thread, the innermost last."""
        running: list[TokenMasks | None] = vars(self._threads).setdefault("running", [])
        return running

    @contextmanager
    def watched(self, running: tuple[Args, Kwargs] | None = None) -> Iterator[None]:
        """Observe the arguments of the model's modules in the context, by hooks."""
        self._running.clear()  # left by forward passes in this thread that began under another watch
        with undone(partial(self._take_off, *self._model.modules()), self._running.clear):
            for module in self._model.modules():
                if takes_masks(module):
                    self._put_on(module)
            if running is not None and self._model in self._hooks:
                self._before(self._model, *running)
            yield

    def _put_on(self, module: nn.Module) -> None:
        self._hooks[module] = hooks.Hooks(module, self._before, self._after, prepend=True)
        self._hooks[module].put_on()

    def _take_off(self, *modules: nn.Module) -> list[nn.Module]:
        taken = [module for module in modules if module in self._hooks]
        for module in taken:
            self._hooks[module].remove()
            del self._hooks[module]
        return taken

    def _step_aside(self, module: nn.Module) -> None:
        """Remove the hooks while a module runs: torch's layers refuse nested tensors if they have hooks."""
        taken = self._take_off(*module.modules())

        def after(finished: nn.Module, inputs: object, output: object) -> None:
            if finished is module:
                ended.remove()
                for each in taken:
                    self._put_on(each)

        ended = register_module_forward_hook(after, always_call=True)

    def _before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if module is self._model:  # also resets after an interrupted forward pass
            self._running.clear()
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
            self._step_aside(module)
            return
        try:
            masks = token_masks(module, args, kwargs)
        except Exception as error:  # arguments may be anything
            masks = None
            self._failed = f"padding of the inputs: {failure(error)}"
        if module is self._model:
            self._bare = masks is not None and self.real is None and _begins_bare(module, masks, args, kwargs)
        self._running.append(masks)

    def _after(self, module: nn.Module, args: Args, output: Any) -> None:
        if self._running:
            self._running.pop()

    def marked(self, call: AttentionCall, audit: Audit) -> AttentionCall:
        """Return a call with its padded queries marked, if its adapter did not mark them."""
        if self._failed is not None:
            audit.remarks[Remark(call.module, self._failed)] += 1
        code = "padding"
        if self._bare:
            audit.remarks[Remark("", NOT_MASKED, code)] += 1
        if self.real is not None:
            queries, remark = self._of_the_user(self.real.to(call.q.device), call)
            code = NOT_APPLIED_CODE
        elif call.queries is not None:
            return call
        else:
            queries, remark = self.queries(call)
            if queries is None and remark is None:
                queries = padded_by_own_mask(call)
                remark = None if queries is None else OWN_KEY
        call = replace(call, queries=queries)
        if remark is not None:
            audit.remarks[Remark(call.module, remark, code)] += 1
        full = call.fully_masked
        if full is not None and bool((full.any(-1) & call.counted).any()):  # a query that counts
            audit.remarks[Remark(call.module, AVERAGED, "fully-masked")] += 1
        return call.averaged()

    def _of_the_user(self, real: Tensor, call: AttentionCall) -> RealQueries:
        batch, _, length, _ = call.q.shape
        first = call.keys_before + call.first_query
        if len(real) == batch and first >= real.shape[1]:  # tokens generated since the mask was given
            self.fitted = True
            return call.queries, None
        queries = query_part(real, call)
        if queries is None:
            queries = query_part_of_folded(real, call)
        if queries is None:
            why = f"it has {counted(real.shape[1], 'token')}, but there are {first + length}"
            if real.shape[1] == first + length:
                why = f"it has {counted(len(real), 'sample')}, but the batch axis has {counted(batch, 'row')}"
            return call.queries, f"{NOT_APPLIED}: {why}"
        self.fitted = True
        return queries if call.queries is None else queries & call.queries, None

    def queries(self, call: AttentionCall) -> RealQueries:
        """Return which queries of a call are real, and a remark; None for either."""
        real, remark = self._by_masks(call)
        # Learned queries are no tokens: they are equal in two samples with different keys.
        padded = real is not None and not bool(real.all())
        learned = padded and len(call.q) > 1 and _alike(call.q) and not _alike(call.k)
        return (None, None) if learned else (real, remark)

    def _by_masks(self, call: AttentionCall) -> RealQueries:
        remark = None
        crossing = False
        for masks in filter(None, reversed(self._running)):
            crossing |= masks.crossing
            for name, mask in masks.masks.items():
                if _may_be_targets(name, masks, crossing, call):
                    continue
                if mask is None:
                    if masks.sure(name) and not masks.more_axes:
                        return None, None
                    continue
                queries, why = _of_queries(name, mask.to(call.q.device), masks, crossing, call)
                if queries is not None:
                    return queries, why
                if not (masks.other_inputs and _of_others(mask, call)):
                    remark = why or remark
                if masks.sure(name):
                    return None, remark
        return self._by_attention(call, crossing, remark)

    def _by_attention(self, call: AttentionCall, crossing: bool, remark: str | None) -> RealQueries:
        """Return which queries are real where no token mask says it."""
        outermost = next(iter(self._running), None)
        if outermost is not None and outermost.more_axes and call.q.shape[2] > 1:  # one: as in generation
            queries = None if crossing else real_by_own_mask(call)
            if queries is None:
                remark = "a mask with axes other than tokens was given: padded queries cannot be told apart"
            return queries, remark
        marked = any(masks is None or masks.definitive for masks in self._running)
        end = padded_end(call) if remark is None and not (crossing or marked) else None
        if end is not None:  # no token mask was given, but keys look like padding
            remark = (
                f"the {end} keys of some samples are hidden from all queries: if they are padding, their own "
                "queries count all the same; say which tokens are real with real="
            )
        return None, remark


def _begins_bare(module: nn.Module, masks: TokenMasks, args: Args, kwargs: Kwargs) -> bool:
    """Return whether some samples, not all, begin with the model's padding token, and no mask was given."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    pad = getattr(getattr(module, "config", None), "pad_token_id", None)
    if masks.more_axes or any(mask is not None for mask in masks.masks.values()) or not isinstance(pad, int):
        return False
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        return False
    first = ids[:, 0] == pad
    left = first & (ids != pad).any(1)  # a step of a generation has padding alone where a sample has ended
    return bool(left.any()) and not bool(first.all())


def _may_be_targets(name: str, masks: TokenMasks, crossing: bool, call: AttentionCall) -> bool:
    """Return whether a mask is the target's, while this may be the encoder."""
    return masks.sure(name) and not (masks.definitive or crossing or "decoder" in call.module)


def _of_queries(name: str, mask: Tensor, masks: TokenMasks, crossing: bool, call: AttentionCall) -> RealQueries:
    """Return which queries are real by a token mask, (B, Lq) bool or None; and a remark or None."""
    part = query_part(mask, call)
    if part is None:
        folded = query_part_of_folded(mask, call)
        if folded is not None:
            return folded, None
    elif masks.sure(name):
        if not is_of_pairs(mask, call):
            return part, None
    elif crossing and (masks.crossing or masks.two_sequences):
        why = (
            f"{name} may belong to the keys, which are another sequence than the queries: all queries count; say "
            "which are real with real="
        )
        return None, None if bool(part.all()) else why
    else:
        queries, remark = _read_by_keys(name, mask, part, masks.two_sequences, call)
        if queries is not None:
            return queries, remark
    return None, _why_all_count(name, mask, call)


def _read_by_keys(name: str, mask: Tensor, part: Tensor, two_sequences: bool, call: AttentionCall) -> RealQueries:
    """Return the result of :func:`_of_queries` by the reading of the mask that the keys confirm."""
    everyone = torch.ones_like(part[:, :1])  # for two sequences, or against the name: no query may see padding
    for reading in readings(name, mask):
        queries = reading[:, -part.shape[1] :]
        seeing = queries if reading is mask and not two_sequences else everyone
        if not true_of_keys(reading, seeing, call) or is_of_pairs(reading, call):
            continue
        if reading is mask:
            return queries, None
        allowed = call.part().allowed
        if allowed is None or not bool((queries & ~allowed.any(3).any(1)).any()):  # every real query sees some key
            return queries, f"{name} is read as true for padding, which the keys confirm"
    return None, None


def _of_others(mask: Tensor, call: AttentionCall) -> bool:
    """Return whether a call without any mask has other tokens than a token mask: those of an image or a sound."""
    unmasked = call.allowed is None and call.selected is None and not call.causal
    return unmasked and mask.shape[1] != call.keys_before + call.k.shape[2]


def _why_all_count(name: str, mask: Tensor, call: AttentionCall) -> str | None:
    """Return a remark on a mask that could not mark any query as padding; None if it marks none here."""
    last = mask[:, -call.q.shape[2] :]  # the queries' part; earlier tokens are in a cache, or have left it
    if bool(mask.all()) or (len(mask) == len(call.q) and last.shape[1] < mask.shape[1] and bool(last.all())):
        return None
    if len(call.q) > len(mask) and len(call.q) % len(mask) == 0:
        return f"{name} marks padding, but not which rows here: all queries count"
    return f"{name} marks padding, but the keys here do not confirm it: all queries count"
