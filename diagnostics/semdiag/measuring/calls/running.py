"""Run any model while its attention is watched: in evaluation mode, without gradients, unchanged."""

import copy
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.capturing.audit import Audit, Remark
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel, in_evaluation_mode
from semdiag.capturing.padding import Padding
from semdiag.capturing.recording import runs_masked
from semdiag.measuring.calls.collector import NotAvailableError, counted_as, folded
from semdiag.measuring.calls.counted_rows import remark_path
from semdiag_files import InputError
from semdiag_models import Encoder

DRAWS = "its forward pass draws random numbers in evaluation mode"


class RandomNumbers:
    """States of torch's global generators at construction, for the CPU and a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()

    @property
    def drawn(self) -> bool:
        """Whether numbers have been drawn since then."""
        return any(not torch.equal(now, then) for now, then in zip(self._now(), self._states, strict=True))

    def again(self) -> None:
        """Restore the state, so that the same numbers are drawn again."""
        torch.set_rng_state(self._states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._states[1], self._device)

    def _now(self) -> list[Tensor]:
        of_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *of_device]


_GROUPED = (
    ": its experts are one grouped matrix product, which does not support float64; "
    'model.set_experts_implementation("eager") multiplies them one by one'
)
_NO_ROOM = ("not enough memory", "out of memory", "can't allocate memory")


class NoRoomError(InputError):
    """Raised if a batch does not fit in memory."""


def no_room(path: str, batch: Batch, error: BaseException) -> NoRoomError | None:
    """Return the error that a batch does not fit in memory, if that is what an exception says; else None."""
    says_so = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_ROOM)
    if not (says_so or isinstance(error, MemoryError | torch.OutOfMemoryError)):
        return None
    samples = batching.samples_of(batch)
    length = batching.longest(batch)
    size_in_words = f"a batch of {samples} with {length:,} tokens" if samples > 1 else f"{length:,} tokens"
    return NoRoomError(
        f"{path}: {size_in_words} do not fit in memory. Cut texts with --max-length {max(1, length // 2)}."
    )


class ModelRun:
    """Runs the model on a batch; a consumer gets every attention call of the forward pass."""

    module: nn.Module  # model that runs, or a copy that was moved or converted
    device: torch.device  # device of the module
    dtype: torch.dtype  # dtype of the module
    audit: Audit  # audit of the capture
    padding: Padding  # rule that decides which queries are padding

    def __init__(
        self, loaded: LoadedModel, consume: Callable[[AttentionCall], None], queries: Tensor | None
    ) -> None:
        self._loaded = loaded
        self._consume = consume
        self._queries = queries
        self._layers: dict[tuple[str, int], int] = {}
        self._samples = 0
        self._batch = 0
        self._second = 0
        self.drew = False
        self._failure: BaseException | None = None

    def __call__(self, batch: Batch) -> Any:
        """Run the model on a batch."""
        size = batching.samples_of(batch)
        batch = batching.moved(batch, self.device, self.dtype)
        if self._queries is not None:
            self.padding.real = self._queries[self._samples : self._samples + size].bool().to(self.device)
        self._samples = self._samples + size
        self._batch = size
        self._second = batching.second_axis(self.module, batch)
        numbers = RandomNumbers(self.device)
        try:
            if not self._loaded.external:
                return self.module(batch)
            output = batching.call(self.module, batch)
        except InputError:
            raise
        except Exception as error:  # models raise anything
            if (full := no_room(self._loaded.path, batch, error)) is not None:
                raise full from None
            if error is self._failure or not self._loaded.external:  # raised by our consumer, or by our model
                raise
            reason = " ".join(str(error).split())[:200]
            labels = ""
            if isinstance(batch, tuple | list) and len(batch) > 1:
                labels = " Labels that are no argument of the model go to labels=."
            if self.dtype == torch.float64:
                grouped = "grouped_mm" in "".join(traceback.format_tb(error.__traceback__))
                raise NotAvailableError(
                    f"{self._loaded.path} cannot run in float64, in which it is measured here "
                    f"({type(error).__name__}: {reason}){_GROUPED if grouped else ''}"
                ) from error
            raise InputError(
                f"{self._loaded.path} cannot be run on these inputs ({type(error).__name__}: {reason}). It is "
                "called with a batch's tensor, with a dictionary's entries by name, or with a tuple's; for a "
                f"model that takes a dictionary as one argument, use [(dictionary,)].{labels}"
            ) from error
        if not self.drew and numbers.drawn:
            self.drew = True
            remark = f"{DRAWS}: another run on the same inputs has other scores"
            self.audit.remarks[Remark("", remark, "random-forward")] += 1
        return output

    def alike(self) -> None:
        """Refuse a model that draws random numbers, so that copies of an input in one batch differ."""
        if self.drew:
            raise NotAvailableError(f"{DRAWS}: copies of an input differ by more than the added noise")

    def add(self, call: AttentionCall) -> None:
        """Pass a call to the consumer."""
        layer = call.layer
        if self._loaded.external:
            layer = self._layers.setdefault((call.module, call.occurrence), len(self._layers))
        rows = call.q.shape[0]
        if (problem := folded(rows, self._batch, self._second)) is not None:
            self.audit.remarks[Remark(call.module, f"{problem}: {counted_as(rows, self._batch)}")] += 1
        remark_path(call, self.audit)
        try:
            self._consume(replace(self.padding.marked(call, self.audit), layer=layer))
        except BaseException as error:
            self._failure = error
            raise


@contextmanager
def running(
    loaded: LoadedModel,
    consume: Callable[[AttentionCall], None],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    queries: Tensor | None = None,
) -> Iterator[ModelRun]:
    """Run a model in evaluation mode without gradients; restore the mode of every module afterwards."""
    run = ModelRun(loaded, consume, queries)
    with ExitStack() as stack:
        run.module, run.device, run.dtype = stack.enter_context(in_evaluation(loaded, device, dtype))
        run.padding = Padding(run.module)
        stack.enter_context(run.padding.watched())
        run.audit = stack.enter_context(watch_attention(run.module, run.add))
        yield run


@contextmanager
def in_evaluation(
    loaded: LoadedModel, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[nn.Module, torch.device, torch.dtype]]:
    """Put a model on a device, in evaluation mode without gradients; restore every module's mode afterwards."""
    module = loaded.module
    tensors = _floating(loaded.module)
    place, kind = home_of(module)
    place = place if device is None else torch.device(device)
    kind = kind if dtype is None else dtype
    is_there = all(t.is_meta or t.device.type == place.type for t in tensors)
    if not is_there or (dtype is not None and converted(module, dtype)):  # only then is it copied
        if any(t.is_meta for t in tensors):
            raise NotAvailableError(
                "its weights are offloaded (meta tensors): it runs only as it is, on its device and in its dtype"
            )
        refuse_masked(module, "in another dtype or on another device")
        module = placed(copy.deepcopy(module), place, dtype)
    modes = [(part, part.training) for part in module.modules()]
    try:
        in_evaluation_mode(module)
        with torch.no_grad():
            yield module, place, kind
    finally:
        for part, mode in modes:
            part.training = mode


def unnamed(module: LoadedModel | nn.Module) -> LoadedModel:
    """Wrap a user's module as if it had been loaded; a loaded model stays as it is."""
    if isinstance(module, LoadedModel):
        return module
    if not isinstance(module, nn.Module):
        raise InputError(
            f"A model is a torch.nn.Module or what semdiag.load returns. Got {type(module).__name__}."
        )
    return LoadedModel("model", "", module, "python" if isinstance(module, Encoder) else "module", "unknown")


def home_of(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of a model: those of its first floating-point tensor with values."""
    tensors = _floating(module)
    first = next((t for t in tensors if not t.is_meta), None)
    kind = torch.get_default_dtype() if not tensors else tensors[0].dtype
    return (torch.device("cpu"), kind) if first is None else (first.device, first.dtype)


def placed(
    module: nn.Module, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Move and convert a module in place, as transformers loads it."""
    restored = [(held, name, held[name].data) for held, name in _frequencies(module)]
    restored += [(held, name, held[name].data.float()) for held, name in _kept_in_float32(module, dtype)]
    module.to(device=device, dtype=dtype)
    for held, name, values in restored:
        held[name].data = values.to(device=device)
    return module


def _kept_in_float32(module: nn.Module, dtype: torch.dtype | None) -> list[tuple[dict[str, Any], str]]:
    """Return the places of tensors that transformers keeps in float32 when it loads a model in 16 bits."""
    names = []
    if dtype in (torch.bfloat16, torch.float16):
        names.append("_keep_in_fp32_modules_strict")
    if dtype == torch.float16:
        names.append("_keep_in_fp32_modules")
    named = {
        part_name for part in module.modules() for name in names for part_name in getattr(part, name, None) or ()
    }
    pattern = re.compile("|".join(sorted(named)) or "(?!)")  # without names it matches nothing
    return [
        (held, name)
        for place, part in module.named_modules()
        for held in (part._parameters, part._buffers)
        for name, values in held.items()
        if values is not None and values.is_floating_point() and pattern.search(f"{place}.{name}")
    ]


def _frequencies(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the places of rotary frequencies in transformers' modules."""
    held = [part._buffers for part in module.modules() if type(part).__module__.startswith("transformers.")]
    return [(x, name) for x in held for name in x if name.endswith("inv_freq") and x[name] is not None]


def converted(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module must be converted to run in a dtype."""
    exempt = {id(held[name]) for held, name in (*_frequencies(module), *_kept_in_float32(module, dtype))}
    return any(t.dtype != dtype for t in _floating(module) if id(t) not in exempt)


def _floating(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]


def refuse_masked(module: nn.Module, condition: str) -> None:
    """Refuse a model under sparsify, since a copy of it would run without the mask."""
    if runs_masked(module):
        raise InputError(
            f"The model runs under sparsify, which masks the model itself: a copy of it, {condition}, would run "
            "without the mask."
        )
