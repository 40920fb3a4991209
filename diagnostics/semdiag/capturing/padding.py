"""Which queries of an attention are padding: told by the masks of tokens that the modules around it were given."""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Audit, Remark, failure
from semdiag.capturing.batches import Batch
from semdiag_models import InputError

# Arguments that mark a module's own tokens: true or 1 where a token is real; in the second group where it is not.
_REAL = ("decoder_attention_mask", "attention_mask", "padding_mask")
_PADDED = ("tgt_key_padding_mask", "src_key_padding_mask", "key_padding_mask")
_MASKS = (*_REAL, *_PADDED)
# A module that takes one of these tells apart its own tokens from another sequence's.
_DECODER = ("encoder_attention_mask", "memory")
# Where one of these is given, the module attends to another sequence, and its mask is that sequence's.
_OTHER = ("key_value_states", "encoder_hidden_states")

NOT_APPLIED = "real is not applied here"  # beginning of a remark


@dataclass(frozen=True, eq=False)
class _Frame:
    """A running module that takes masks of tokens: (B, L) bool by argument, true where a token is real."""

    masks: dict[str, Tensor | None]
    definitive: bool
    other: bool  # whether a mask of more axes was given


class Padding:
    """Follows which masks of tokens the running modules were given.

    A mask counts for the queries of the attentions inside the module that it was given to: the innermost such
    module decides. It counts only where it is true of the keys, too (nobody attends to padding), unless the module
    says by its arguments that it is a decoder; a mask of the keys of a cross-attention is none of its queries, and
    one of queries by keys (L, L) is none of tokens, also where the batch has L samples.

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
        self._hooks: dict[nn.Module, tuple[RemovableHandle, RemovableHandle]] = {}

    @property
    def _frames(self) -> list[_Frame | None]:
        """Those of this thread."""
        if not hasattr(self._threads, "frames"):
            self._threads.frames = []
        found: list[_Frame | None] = self._threads.frames
        return found

    @contextmanager
    def watched(self, running: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> Iterator[None]:
        """Listen to the arguments of the model's modules; hooks are removed when the context is left.

        Args:
            running: the arguments of the model's forward, by position and by name, where it runs already.
        """
        with ExitStack() as stack:
            stack.callback(self._frames.clear)
            stack.callback(self._take_off, *self._model.modules())
            for module in self._model.modules():
                names = () if isinstance(module, torch.jit.ScriptModule) else _parameters(module)
                if {*names} & {*_MASKS}:
                    self._put_on(module)
            if running is not None and self._model in self._hooks:
                self._before(self._model, *running)
            yield

    def _put_on(self, module: nn.Module) -> None:
        before = module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        self._hooks[module] = before, module.register_forward_hook(self._after, always_call=True)

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
            self._frames.clear()
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
            self._step_aside(module)
            return
        try:
            frame = _frame(module, args, kwargs)
        except Exception as error:  # whatever the arguments of an unknown model are
            frame, self._failed = None, f"padding of the inputs: {failure(error)}"
        self._frames.append(frame)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._frames:
            self._frames.pop()

    def marked(self, call: AttentionCall, audit: Audit) -> AttentionCall:
        """Mark a call's padded queries, where its adapter did not.

        Args:
            call: that runs now.
            audit: gets a remark if a mask was given, by the user too, that could not be matched.
        """
        if self._failed is not None:
            audit.remarks[Remark(call.module, self._failed)] += 1
        if self.given is not None:
            queries, remark = self._of_the_user(self.given.to(call.q.device), call)
        elif call.queries is not None:
            return call
        else:
            queries, remark = self.queries(call)
        if remark is not None:
            audit.remarks[Remark(call.module, remark)] += 1
        return replace(call, queries=queries)

    def _of_the_user(self, given: Tensor, call: AttentionCall) -> tuple[Tensor | None, str | None]:
        """As :meth:`queries`, by the mask that the user gave."""
        batch, _, length, _ = call.q.shape
        if len(given) == batch and call.first_query >= given.shape[1]:  # tokens that were generated since
            self.fitted = True
            return call.queries, None
        own = _of_queries(given, batch, length, call.first_query)
        if own is None:
            own = _of_folded(given, call)
        if own is None:
            why = f"it is of {given.shape[1]} tokens, and there are {call.first_query + length}"
            if given.shape[1] == call.first_query + length:
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
            not be matched, else None.
        """
        remark = None
        batch, _, length, _ = call.q.shape
        for frame in reversed(self._frames):
            if frame is None:
                continue
            decoder = frame.definitive or "decoder" in call.module
            for name in _MASKS:
                if name not in frame.masks or (name.startswith(("decoder", "tgt")) and not decoder):
                    continue
                mask = frame.masks[name]
                if mask is None:
                    if frame.definitive and not frame.other:
                        return None, None
                    continue
                mask = mask.to(call.q.device)  # a model spread over devices is given it on one
                own = _of_queries(mask, batch, length, call.first_query)
                sure = frame.definitive or name.startswith(("decoder", "tgt"))
                folded = _of_folded(mask, call) if own is None else None
                if folded is not None:
                    return folded, None
                if own is not None and (sure or _true_of_keys(mask, own, call)) and not _of_pairs(mask, call):
                    return own, None
                if not bool(mask.all()):
                    remark = f"{name} marks padding that the keys here do not have: all queries count"
                    if batch > len(mask) and batch % len(mask) == 0:
                        remark = f"{name} marks padding, of which rows here cannot be told: all queries count"
                if sure:
                    return None, remark
        if any(frame is not None and frame.other for frame in self._frames[:1]):
            own = _of_a_causal_mask(call)
            return (
                own,
                None if own is not None else "a mask of four axes was given: padded queries are not told apart",
            )
        if remark is None and not any(frame is None or frame.definitive for frame in self._frames):
            remark = _looks_padded(call)
        return None, remark


def checked_real(real: Tensor | None) -> Tensor | None:
    """Which tokens are real, as the user says it.

    Args:
        real: (N, L), true or not 0 where a token is real; None: not said.

    Returns:
        (N, L) bool, or None.

    Raises:
        InputError: if it is none of these.

    Example:
        >>> checked_real(torch.tensor([[1, 0]]))
        tensor([[ True, False]])
    """
    if real is None:
        return None
    if not isinstance(real, Tensor) or real.ndim != 2:
        got = f"one of shape {tuple(real.shape)}" if isinstance(real, Tensor) else f"a {type(real).__name__}"
        raise InputError(f"real must be a tensor (samples, tokens), true where a token is real. Got {got}.")
    return real.bool()


def real_tokens(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Which tokens of a batch are real, by what the model itself is given.

    Args:
        model: whose signature names positional arguments.
        batch: a tensor, a dictionary or a tuple.

    Returns:
        (B, L) bool by argument; empty where nothing marks padding. Of a decoder that is given tokens and no mask
        all are real.

    Example:
        >>> class Model(nn.Module):
        ...     def forward(self, attention_mask): ...
        >>> real_tokens(Model(), {"attention_mask": torch.tensor([[1, 1, 0]])})["attention_mask"].tolist()
        [[True, True, False]]
    """
    named = dict(batch) if isinstance(batch, Mapping) else {}
    values = () if named else (batch,) if isinstance(batch, Tensor) else tuple(batch)
    frame = _frame(model, values, named)
    found = {} if frame is None else {name: mask for name, mask in frame.masks.items() if mask is not None}
    ids = named.get("decoder_input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        found.setdefault("decoder_attention_mask", torch.ones_like(ids, dtype=torch.bool))
    return found


def _parameters(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def _frame(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Frame | None:
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself will say what is wrong
        return None
    given = {**given, **given.get("kwargs", {})}
    names = _parameters(module)
    definitive = any(name in names for name in _DECODER)
    if any(given.get(name) is not None for name in _OTHER) and "encoder_attention_mask" not in names:
        return None
    if isinstance(module, nn.MultiheadAttention) and given.get("query") is not given.get("key"):
        return None
    both = "decoder_attention_mask" in names or {"src_key_padding_mask", "tgt_key_padding_mask"} <= {*names}
    masks: dict[str, Tensor | None] = {}
    other = False
    for name in _MASKS:
        value = given.get(name)
        if name not in names and value is None:
            continue
        if isinstance(value, Tensor) and value.ndim == 2:
            marked = value.bool() if value.dtype == torch.bool else value != 0
            masks[name] = marked if name in _REAL else ~marked
        elif value is not None:
            other = True
        else:
            masks[name] = None
    return _Frame(masks, definitive and not both, other)


def _of_queries(mask: Tensor, batch: int, length: int, first: int) -> Tensor | None:
    """The part of a mask of tokens that belongs to the queries; None if there is none."""
    if len(mask) == 0 or batch % len(mask) or mask.shape[1] != (first + length if first else length):
        return None
    own = mask[:, mask.shape[1] - length :]
    return own if len(mask) == batch else None


def _of_folded(mask: Tensor, call: AttentionCall) -> Tensor | None:
    """Likewise where the batch axis holds several rows per sample, whose keys tell in which order; else None."""
    batch, _, length, _ = call.q.shape
    times = batch // max(1, len(mask))
    if times < 2:
        return None
    found: list[Tensor] = []
    for rows in (mask.repeat_interleave(times, 0), mask.repeat(times, 1)):
        own = _of_queries(rows, batch, length, call.first_query)
        if own is not None and _true_of_keys(rows, own, call):
            found.append(own)
    return found[0] if found and all(torch.equal(own, found[0]) for own in found) else None


def _true_of_keys(mask: Tensor, queries: Tensor, call: AttentionCall) -> bool:
    """Whether no real query may attend to padding, and the keys are the tokens that the mask is of."""
    if mask.shape[1] > call.k.shape[2]:
        return False
    if bool(mask.all()):
        return True
    seen = call.part().allowed
    if seen is None:
        return call.selected is not None
    padded = ~mask[:, None, None, :]
    return not bool((seen[..., : mask.shape[1]] & padded & queries[:, None, :, None]).any())


def _of_pairs(mask: Tensor, call: AttentionCall) -> bool:
    """Whether a mask of as many samples as tokens is one of queries by keys, (L, L), as a causal one.

    It is where no query of any sample sees more than its row of the mask, and one sees what would be padding of
    its sample.
    """
    seen = call.part().allowed
    if seen is None or mask.shape != (call.q.shape[2], call.k.shape[2]) or len(mask) != len(call.q):
        return False
    return not bool((seen & ~mask).any()) and bool((seen & ~mask[:, None, None]).any())


def _looks_padded(call: AttentionCall) -> str | None:
    """Say that the first or last keys of samples are forbidden to all queries, which are as many, their own too.

    Beyond that nothing is forbidden but the future: in windows, blocks and sets that a model selects every key is
    some query's, or others are forbidden to each.
    """
    seen, (batch, _, length, _) = call.allowed, call.q.shape
    if seen is None or call.first_query or len(seen) < batch or not seen.shape[3] == call.k.shape[2] == length > 1:
        return None
    keys = seen.any(2, keepdim=True).any(1, keepdim=True)
    if bool(keys.all()):
        return None
    ends = keys.to(torch.int8).diff(dim=3)  # 1 where padding on the left ends, -1 where it begins on the right
    places = [name for name, step in (("last", -1), ("first", 1)) if bool((ends == step).any())]
    if len(places) != 1 or int((ends != 0).sum(3).max()) > 1:
        return None
    past = torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
    if not (bool((seen == keys).all()) or bool((seen == (keys & past)).all())):
        return None
    counted = seen.any(3) if not call.causal else call.part().allowed.any(3)  # type: ignore[union-attr]
    if not bool((counted & ~keys[:, :, 0]).any()):
        return None  # padded queries see nothing, and are left out
    return (
        f"the {places[0]} keys of some samples are forbidden to all queries: if they are padding, their "
        "own queries count all the same; say which tokens are real with real="
    )


def _of_a_causal_mask(call: AttentionCall) -> Tensor | None:
    """Of a causal attention whose mask alone is known: padded queries do not see themselves, or see the future."""
    seen = call.part().allowed
    batch, _, length, _ = call.q.shape
    if seen is None or length == 1 or call.first_query + length > call.k.shape[2]:
        return None
    seen = seen.expand(batch, seen.shape[1], length, call.k.shape[2]).any(1)
    place = torch.arange(call.first_query, call.first_query + length, device=seen.device)
    own = seen[:, torch.arange(length, device=seen.device), place]
    future = (seen & (torch.arange(seen.shape[2], device=seen.device) > place[:, None])).any(-1)
    real = own & ~future
    return real if bool(real[:, :-1].any(1).all()) else None
