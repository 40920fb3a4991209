"""Watch a model's attention, or the blocks of an encoder, while it runs."""

import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.utils.hooks import RemovableHandle

from semdiag.capturing import patches, recording
from semdiag.capturing.adapters import torch_functions
from semdiag.capturing.adapters.fused import forget_last
from semdiag.capturing.adapters.hugging_face import attends_by_interface, intercepted_interface
from semdiag.capturing.adapters.torch_functions import FunctionWatch, core_call, masked_inputs
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Audit
from semdiag.capturing.private_parts import FOUNDATIONS, broken_parts, mask_refusal, remarks_on_parts
from semdiag.capturing.provenance.operations import OperationWatch
from semdiag_files import InputError
from semdiag_models import AttentionCore, Encoder

# Those of the hooks come last: by them the numbers are found again after an interrupt.
_TABLES = ("pre_hooks_with_kwargs", "hooks_with_kwargs", "hooks_always_called", "pre_hooks", "hooks")


class Hook(partial[None]):
    """A hook that does nothing in copies and saved files of its module, even where semdiag is not installed."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a function that takes anything and returns None."""
        return getattr, (nullcontext(RemovableHandle(OrderedDict())), "__exit__")


class Hooks:
    """Two hooks on a module, which its copies do not run; removable even if only one is registered."""

    def __init__(
        self, module: nn.Module, before: Callable[..., None], after: Callable[..., None], prepend: bool = False
    ) -> None:
        def unless_removed(*arguments: Any) -> None:
            if len(arguments) == 3:  # torch omits keyword arguments if the hook was removed meanwhile
                before(*arguments)

        self._module = module
        self._prepend = prepend
        self._before = Hook(unless_removed)
        self._after = Hook(after)
        self._handles: list[RemovableHandle] = []

    def put_on(self) -> None:
        """Register both hooks."""
        put_on = self._module.register_forward_pre_hook
        self._handles.append(put_on(self._before, prepend=self._prepend, with_kwargs=True))
        self._handles.append(self._module.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        """Remove the registered hooks, of which an interrupt may have lost the handles."""
        for handle in self._handles:
            handle.remove()
        take_off_hooks(self._module, self._before, self._after)


def take_off_hooks(module: nn.Module | None, *hooks: object) -> None:
    """Remove hooks from a module (None: from all modules), where they are registered."""
    owner, prefix = (of_all_modules, "_global_forward_") if module is None else (module, "_forward_")
    tables = [getattr(owner, prefix + name, None) or {} for name in _TABLES]
    numbers = [n for table in tables for n, hook in table.items() if any(hook is each for each in hooks)]
    for table in tables:
        for number in numbers:
            table.pop(number, None)


_NATIVE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_COMPILERS = ("torch._dynamo", "torch.nn.attention.flex_attention")
__all__ = ["AttentionCall", "watch_attention"]


@contextmanager
def watch_attention(
    model: nn.Module,
    consume: Callable[[AttentionCall], None],
    *,
    mask: recording.Mask | None = None,
    inside: tuple[object, ...] | None = None,
) -> Iterator[Audit]:
    """Call ``consume`` for every softmax attention of the model inside the context.

    It works for any model (docs/your-own-model.md). Nothing is left behind. Outputs are those of the model alone,
    to the last bit, except where the rounding differs: the fused paths of ``nn.TransformerEncoder`` and
    ``nn.MultiheadAttention`` in evaluation mode without gradients, and compiled models, run as they were written.
    It never stops the model: if it fails itself, the audit says so. What ``consume`` raises is raised there.

    Every softmax that reaches torch's dispatcher is captured; or the audit lists it, because it meets values and
    is not captured; or counts it, because it is no attention. It also lists products that meet values without a
    softmax. Contexts may be nested, and may overlap in threads and asynchronous tasks: each sees what runs in its
    own thread or task, and in those without a watch of their own. A watch with a mask masks what all others see.

    Args:
        model: any module. Only what runs inside it is seen.
        consume: called with each call while its tensors are alive; reduce them at once, keep none. It runs without
            gradient, autocast and modes.
        mask: function of :func:`~semdiag.capturing.sparsify.sparsify` from a call that is about to run, and its
            inputs where its function may be replaced, to its kept keys or to its output with them.
        inside: arguments of the model, if a hook of its forward pass opens the context.

    Yields:
        Audit: the modules with attention, what was captured and what was not. It fills while the model runs; the
        modules of a model of semdiag_models are known from the start.
    """
    broken = broken_parts(model)
    if broken and mask is not None:
        raise InputError(mask_refusal(broken))
    # then modes would see nothing more, and cost 20 µs per operation
    hooked = torch_functions.hooked_alone(model) or attends_by_interface(model)
    recorder = recording.Recorder(recording.Watched(model, consume, mask, traces=not hooked))
    recorder.audit.remarks.update(remarks_on_parts(broken))
    if FOUNDATIONS.intersection(broken):  # nothing could be seen, or taken off again
        yield recorder.audit
        return
    lent: set[int] = set()
    here = _Modes(recorder, lent)
    hooks = _Hooks(recorder, here, lent, hooked)
    with patches.undone() as stack:
        stack.enter_context(recorder.opened())
        stack.enter_context(patches.undone(hooks.restore))
        # First, because in after() a watch with a mask undoes what the others look at.
        stack.enter_context(hooks.held(first=mask is None))
        stack.enter_context(intercepted_interface(recorder))
        stack.enter_context(_UNCOMPILED.held())
        if not hooked:
            stack.enter_context(torch_functions.MADE_OUTSIDE_MODES.held())
            stack.enter_context(patches.followed(here.handed_on))
            stack.callback(_say_where, threading.current_thread())
            stack.enter_context(patches.undone(here.stop))
            here.start()
            scripted = isinstance(model, torch.jit.ScriptModule) or type(model).__module__.startswith("torch.nn.")
            # Inside a forward pass its arguments are known, and if it fails torch still goes through its hooks.
            if inside is None and not scripted:
                arguments = Hooks(model, recorder.find_edges, lambda *arguments: None)
                stack.enter_context(patches.undone(arguments.remove))
                arguments.put_on()
        if inside is not None:
            hooks.before(model, inside)
        yield recorder.audit


class _Hooks:
    def __init__(self, recorder: recording.Recorder, here: "_Modes", lent: set[int], hooked: bool) -> None:
        self._recorder = recorder
        self._here = here
        self._lent = lent
        self._hooked = hooked
        self._unmasked: dict[AttentionCore, tuple[int, int]] = {}
        # The same objects are registered and removed.
        self._started = self.before
        self._ended = self.after

    @contextmanager
    def held(self, first: bool) -> Iterator[None]:
        """Hook all modules; after the context, other threads remove the hooks when they finish."""
        with patches.undone(lambda: take_off_hooks(None, self._started, *[self._ended] * (not self._lent))):
            of_all_modules.register_module_forward_pre_hook(self._started)  # type: ignore[arg-type]
            ended = of_all_modules.register_module_forward_hook(self._ended, always_call=True)
            if first:
                of_all_modules._global_forward_hooks.move_to_end(ended.id, last=False)  # type: ignore[attr-defined]
            yield

    def restore(self) -> None:
        for core, everywhere in self._unmasked.items():
            core.everywhere = everywhere
        self._unmasked.clear()

    def before(self, module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...] | None:
        """Note that a module is about to run; return its inputs if they change, else None."""
        try:
            return self._begun(module, inputs)
        except Exception as error:
            if not self._recorder.forgives(error, type(module).__name__):
                raise
        return None

    def _begun(self, module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...] | None:
        recorder = self._recorder
        if self._hooked and not module._modules and not isinstance(module, AttentionCore):
            return None  # it makes no attention
        if not recorder.enter(module, inputs):
            return None
        if len(recorder.running) == 1:
            forget_last()
        if not self._hooked:
            self._here.lend()
        if isinstance(module, AttentionCore):
            changed = None if recorder.covered else masked_inputs(recorder, module, inputs)
            recorder.covered += 1
            if changed is not None:
                self._unmasked[module] = module.everywhere
                module.everywhere = (0, 0)
            return changed
        if isinstance(module, _NATIVE) and any(isinstance(x, torch.Tensor) and x.is_nested for x in inputs):
            recorder.skip(type(module).__name__, "of nested tensors, which run below Python: give it padded ones")
            recorder.covered += 1
            taken = patches.take_off(self._here.watch)  # under a mode it refuses them
            recorder.without_watch.append((module, taken))
        return None

    def after(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        try:
            self._done(module, inputs, output)
        except Exception as error:
            if not self._recorder.forgives(error, type(module).__name__):
                raise

    def _done(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        recorder = self._recorder
        name = self._recorder.module
        if recorder.without_watch and recorder.without_watch[-1][0] is module:
            recorder.covered -= 1
            if recorder.without_watch.pop()[1]:
                patches.put_on(self._here.watch)
        if recorder.leave(module) and isinstance(module, AttentionCore):
            recorder.covered -= 1
            if isinstance(output, torch.Tensor) and not recorder.covered:  # None after an exception
                with recorder.guarded("attention core", name):
                    recorder.record(core_call(name, module, inputs, output))
            self.restore()
        if not recorder.running:
            self._here.rest()
            if recorder.watched.closed and not self._lent:
                take_off_hooks(None, self._ended)


class _Modes(threading.local):
    """The modes of a watch in the thread that opened it, and in other threads while they run the model."""

    def __init__(self, recorder: recording.Recorder, lent: set[int]) -> None:  # runs again in each thread
        self._lent = lent  # ids of the other threads that are running the model
        self._recorder = recorder
        self.below = OperationWatch(recorder)
        self.watch = FunctionWatch(recorder, self.below)
        self._on = False

    def start(self) -> None:
        for mode in patches.modes_here():
            if isinstance(mode, FunctionWatch | OperationWatch) and mode.recorder.watched.closed:
                mode.__exit__(None, None, None)  # its context was left elsewhere
        self.below.__enter__()  # type: ignore[no-untyped-call]
        self.watch.__enter__()  # type: ignore[no-untyped-call]
        if not _masks(self.watch):
            patches.put_below(self.below, _masks)
            patches.put_below(self.watch, _masks)
        self._on = True

    def stop(self) -> None:
        self.watch.__exit__(None, None, None)
        self.below.settle()
        self.below.__exit__(None, None, None)
        self._on = False

    def lend(self) -> None:
        """Enter the modes in this thread, where the model starts to run."""
        if not self._on:
            self.start()
            self._lent.add(threading.get_ident())

    def rest(self) -> None:
        """Leave the modes if they were lent to this thread; else settle what was traced."""
        if threading.get_ident() in self._lent:
            self.stop()
            self._lent.discard(threading.get_ident())
        elif self._on:
            self.below.settle()

    def handed_on(self) -> patches.Entered | None:
        """Return a context for threads that get work from the model's forward pass in this thread."""
        go_on = self._recorder.handed_on()
        if go_on is None:
            return None

        @contextmanager
        def entered() -> Iterator[None]:
            if not go_on():
                yield
                return
            started = not self._on
            if started:
                self.start()
            try:
                yield
            finally:
                if started:
                    self.stop()
                self._recorder.forget()

        return entered


def _say_where(opener: threading.Thread) -> None:
    """Warn if the context is left in another thread: modes can be taken off in their own thread only."""
    here = threading.current_thread()
    if here is not opener and opener.is_alive():
        where = f"opened in {opener.name} was closed in {here.name}: its modes stay on {opener.name}"
        text = f"A watch that was {where}, where they record nothing, until a watch opens there again."
        warnings.warn(text, stacklevel=2)


def _masks(mode: object) -> bool:
    return isinstance(mode, FunctionWatch | OperationWatch) and mode.recorder.masking


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled functions as they were written: a compiled graph shows nothing."""
    with patches.undone() as stack:
        if any(name in sys.modules for name in _COMPILERS):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")  # ours
            # of torch 2.12: what runs as it was written has no compiled frames
            warnings.filterwarnings("ignore", message=".*fullgraph=True found no compiled frames")
        else:
            first = iter([True])

            def eager_compile(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                if next(first, False):
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                return original(*args, **kwargs)

            stack.enter_context(patches.replaced(torch, "compile", eager_compile))
        yield


_UNCOMPILED = patches.SharedChange(_uncompiled)


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One pass of a batch through one block, in evaluation mode; tensors (B, L, d) unless said otherwise."""

    layer: int  # position of the block, from 0
    stream: Tensor  # the residual stream at the block's input; in a pre-norm block the first normalisation sees it
    tokens: Tensor  # the attention's input
    attention: AttentionCall  # the attention call
    middle: Tensor  # stream plus output of the attention
    mlp_tokens: Tensor  # the MLP's input
    hidden: Tensor  # (B, L, mlp width), input of the MLP's second matrix
    end: Tensor  # output of the MLP plus its residual; in a post-norm block the second normalisation sees it


@contextmanager
def watch_blocks(encoder: Encoder, consume: Callable[[BlockCall], None]) -> Iterator[None]:
    """Call ``consume`` for every block that a batch passes in the context."""
    values: dict[str, Any] = {}

    def keep(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values[name] = inputs[0]

    def attended(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        values["middle"] = values["stream"] + output

    def ended(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        values["end"] = values["middle" if encoder.config.norm == "pre" else "mlp_tokens"] + output

    def finish(layer: int, *arguments: Any) -> None:
        call = BlockCall(layer=layer, **values)
        values.clear()
        consume(call)

    with ExitStack() as hooks:
        hooks.enter_context(watch_attention(encoder, lambda call: values.update(attention=call)))
        for layer, block in enumerate(encoder.blocks):
            attention, expand, contract = (block.get_submodule(n) for n in ("attention", "expand", "contract"))
            hooked = ((block, "stream"), (attention, "tokens"), (expand, "mlp_tokens"), (contract, "hidden"))
            for part, name in hooked:
                hooks.enter_context(part.register_forward_pre_hook(partial(keep, name)))
            for part, hook in ((attention, attended), (contract, ended), (block, partial(finish, layer))):
                hooks.enter_context(part.register_forward_hook(hook))
        hooks.callback(values.clear)
        yield
