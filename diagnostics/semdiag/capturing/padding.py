"""Which queries of an attention are padding: told by the masks of tokens that the modules around it were given."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from semdiag.capturing import hooks
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Audit, Remark, failure
from semdiag.capturing.padded_queries import (
    are_learned,
    is_of_pairs,
    none_without_keys,
    own_part,
    own_part_of_folded,
    padded_by_own_mask,
    padded_end,
    real_by_own_mask,
    true_of_keys,
)
from semdiag.capturing.token_masks import TokenMasks, readings, takes_masks, token_masks

NOT_APPLIED, NOT_APPLIED_CODE = "real is not applied here", "real-not-applied"  # a remark's beginning, and code
OWN_KEY = (
    "queries to which every key is forbidden, and whose own key is forbidden to all others, are taken for padding"
)
AVERAGED = (
    "a finite constant forbids every key to some queries that are no padding: the model attends to all these keys "
    "alike, and so it is measured"
)


class Padding:
    """Follows which masks of tokens the running modules were given.

    A mask counts for the queries of the attentions inside the module that it was given to: the innermost such
    module decides. It counts only where it is true of the keys, too (nobody attends to padding), unless the module
    says by its arguments that it is a decoder. Where a module was given another sequence for its keys, its mask
    may be that sequence's: it counts for nothing, and a remark says so unless a module around it tells more. One
    of queries by keys (L, L) is none of tokens, also where the batch has L samples.

    Args:
        model: any module.

    Attributes:
        given: (B, L) bool, false for padded queries, where the user says it: masks of modules are not looked at.
        fitted: whether it was that of the queries of a call.
    """

    def __init__(self, model: nn.Module, given: Tensor | None = None) -> None:
        self.given, self.fitted = given, False
        self._model = model
        self._threads = threading.local()
        self._failed: str | None = None
        self._hooks: dict[nn.Module, hooks.Handles] = {}

    @property
    def _running(self) -> list[TokenMasks | None]:
        """Those of this thread."""
        if not hasattr(self._threads, "running"):
            self._threads.running = []
        found: list[TokenMasks | None] = self._threads.running
        return found

    @contextmanager
    def watched(self, running: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> Iterator[None]:
        """Listen to the arguments of the model's modules; hooks are removed when the context is left.

        Args:
            running: the arguments of the model's forward, by position and by name, where it runs already.
        """
        self._running.clear()  # of forwards in this thread that began while another watched
        with ExitStack() as stack:
            stack.callback(self._running.clear)
            stack.callback(self._take_off, *self._model.modules())
            for module in self._model.modules():
                if takes_masks(module):
                    self._put_on(module)
            if running is not None and self._model in self._hooks:
                self._before(self._model, *running)
            yield

    def _put_on(self, module: nn.Module) -> None:
        self._hooks[module] = hooks.put_on(module, self._before, self._after, prepend=True)

    def _take_off(self, *modules: nn.Module) -> list[nn.Module]:
        taken = [module for module in modules if module in self._hooks]
        for hook in (hook for module in taken for hook in self._hooks.pop(module)):
            hook.remove()
        return taken

    def _step_aside(self, module: nn.Module) -> None:
        """Take the hooks off while it runs: torch's layers refuse nested tensors where there are hooks on them."""
        taken = self._take_off(*module.modules())

        def after(other: nn.Module, inputs: object, output: object) -> None:
            if other is module:
                ended.remove()
                for each in taken:
                    self._put_on(each)

        ended = register_module_forward_hook(after, always_call=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._model:  # also cleans up after an interrupted forward
            self._running.clear()
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
            self._step_aside(module)
            return
        try:
            masks = token_masks(module, args, kwargs)
        except Exception as error:  # whatever the arguments of an unknown model are
            masks, self._failed = None, f"padding of the inputs: {failure(error)}"
        self._running.append(masks)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._running:
            self._running.pop()

    def marked(self, call: AttentionCall, audit: Audit) -> AttentionCall:
        """Mark a call's padded queries, where its adapter did not.

        Args:
            call: that runs now.
            audit: gets a remark if a mask was given, by the user too, that could not be matched.
        """
        if self._failed is not None:
            audit.remarks[Remark(call.module, self._failed)] += 1
        code = "padding"
        if self.given is not None:
            queries, remark = self._of_the_user(self.given.to(call.q.device), call)
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
        if _averages(call):
            audit.remarks[Remark(call.module, AVERAGED, "fully-masked")] += 1
        return call.averaged()

    def _of_the_user(self, given: Tensor, call: AttentionCall) -> tuple[Tensor | None, str | None]:
        """As :meth:`queries`, by the mask that the user gave."""
        (batch, _, length, _), first = call.q.shape, call.keys_before + call.first_query
        if len(given) == batch and first >= given.shape[1]:  # tokens that were generated since
            self.fitted = True
            return call.queries, None
        own = own_part(given, call)
        if own is None:
            own = own_part_of_folded(given, call)
        if own is None:
            why = f"it is of {given.shape[1]} tokens, and there are {first + length}"
            if given.shape[1] == first + length:
                why = f"the batch axis holds {batch} rows, and it is of {len(given)} samples"
            return call.queries, f"{NOT_APPLIED}: {why}"
        self.fitted = True
        return own if call.queries is None else own & call.queries, None

    def queries(self, call: AttentionCall) -> tuple[Tensor | None, str | None]:
        """Which queries of a call are real.

        Args:
            call: that runs now.

        Returns:
            (B, Lq) bool, None if nothing says that one is padding; and a sentence if a mask was given that could
            not be matched or was read against its name, else None.
        """
        own, remark = self._by_masks(call)
        if own is not None and not bool(own.all()) and are_learned(call):
            return None, None
        return own, remark

    def _by_masks(self, call: AttentionCall) -> tuple[Tensor | None, str | None]:
        """As :meth:`queries`, by the masks that running modules were given, the innermost first."""
        remark, crossing = None, False
        for masks in filter(None, reversed(self._running)):
            crossing |= masks.crossing
            for name, mask in masks.given.items():
                sure = masks.sure(name)
                if sure and not (masks.definitive or crossing or "decoder" in call.module):
                    continue  # the target's, and this may be the encoder
                if mask is None:
                    if sure and not masks.other:
                        return None, None
                    continue
                mask = mask.to(call.q.device)  # a model spread over devices is given it on one
                own, why = _of_queries(name, mask, masks, crossing, call)
                if own is not None:
                    return own, why
                remark = why or remark
                if sure:
                    return None, remark
        outermost = next(iter(self._running), None)
        one = call.q.shape[2] == 1  # as when generating: it is no padding
        if outermost is not None and outermost.other and not one:
            own = None if crossing else real_by_own_mask(call)
            if own is None:
                remark = "a mask of other axes than tokens was given: padded queries are not told apart"
            return own, remark
        if remark is None and not crossing:
            remark = self._unmarked_padding(call)
        return None, remark

    def _unmarked_padding(self, call: AttentionCall) -> str | None:
        """What to remark where no mask of tokens was given and keys look like padding; None if they do not."""
        if any(masks is None or masks.definitive for masks in self._running):
            return None
        end = padded_end(call)
        if end is None:
            return None
        return (
            f"the {end} keys of some samples are forbidden to all queries: if they are padding, their "
            "own queries count all the same; say which tokens are real with real="
        )


def _averages(call: AttentionCall) -> bool:
    """Whether a query that counts is fully masked."""
    full = call.fully_masked
    return full is not None and bool((full.any(-1) & call.counted).any())


def _of_queries(
    name: str, mask: Tensor, masks: TokenMasks, crossing: bool, call: AttentionCall
) -> tuple[Tensor | None, str | None]:
    """Which queries are real by a mask of tokens, (B, Lq) bool, or None; and a remark on how it was read."""
    own = own_part(mask, call)
    if own is None:
        folded = own_part_of_folded(mask, call)
        if folded is not None:
            return folded, None
    elif masks.sure(name):
        if not is_of_pairs(mask, call):
            return own, None
    elif crossing and (masks.crossing or masks.two):
        if not bool(own.all()):
            return None, (
                f"{name} may be that of the keys, of another sequence than the queries: all queries count; say "
                "which are real with real="
            )
        return None, None
    else:
        queries, remark = _read_by_keys(name, mask, own, masks.two, call)
        if queries is not None:
            return queries, remark
    return None, _why_all_count(name, mask, call)


def _read_by_keys(
    name: str, mask: Tensor, own: Tensor, two: bool, call: AttentionCall
) -> tuple[Tensor | None, str | None]:
    """As :func:`_of_queries`, by the way to read a mask that the keys agree with.

    Args:
        name: of the mask.
        mask: of tokens (B, L).
        own: its part (B, Lq) that belongs to the queries.
        two: whether the module was given two sequences.
        call: that runs now.
    """
    everyone = torch.ones_like(own[:, :1])  # of two sequences, or against the name: no query may see padding
    for reading in readings(name, mask):
        queries = reading[:, -own.shape[1] :]
        seeing = queries if reading is mask and not two else everyone
        if not true_of_keys(reading, seeing, call) or is_of_pairs(reading, call):
            continue
        if reading is mask:
            return queries, None
        if none_without_keys(queries, call):
            return queries, f"{name} is taken to be true for padding, which its keys agree with"
    return None, None


def _why_all_count(name: str, mask: Tensor, call: AttentionCall) -> str | None:
    """What to remark of a mask by which no query is told to be padding; None if it marks none here."""
    last = mask[:, -call.q.shape[2] :]  # of the queries, where earlier tokens are in a cache, or have left it
    if bool(mask.all()) or (len(mask) == len(call.q) and last.shape[1] < mask.shape[1] and bool(last.all())):
        return None
    if len(call.q) > len(mask) and len(call.q) % len(mask) == 0:
        return f"{name} marks padding, of which rows here cannot be told: all queries count"
    return f"{name} marks padding that the keys here do not have: all queries count"
