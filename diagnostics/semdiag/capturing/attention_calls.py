"""Watching a model's attention while it runs."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_core import core_call
from semdiag.capturing.audit import Audit
from semdiag.capturing.hugging_face import intercepted_interface
from semdiag.capturing.operations import watched_operations
from semdiag.capturing.recording import Recorder
from semdiag.capturing.torch_functions import FunctionWatch
from semdiag_models import AttentionCore

_COMPILERS = ("torch._dynamo", "torch.nn.attention.flex_attention")
__all__ = ["AttentionCall", "watch_attention"]


@contextmanager
def watch_attention(
    model: nn.Module, consume: Callable[[AttentionCall], None], *, operations: bool = False
) -> Iterator[Audit]:
    """Call ``consume`` for every softmax attention of the model inside the context.

    Any model: encoders of semdiag_models, Hugging Face transformers, torch's own attention modules and functions,
    attention written by hand as softmax of a product of queries and keys, times values. Nothing is attached to the
    model and nothing is left behind, by whatever way the context is left. Outputs are those of the model
    without the watch, to the last bit, with two exceptions, where the rounding differs: the fused paths that
    ``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` take in evaluation mode without gradients, and compiled
    models; both run as they were written inside.

    Not seen: attention in worker threads (``nn.DataParallel``), in jit graphs, in ``flex_attention``, and
    attention without a softmax. Contexts may be nested.

    Args:
        model: any module. Only what runs inside it is seen.
        consume: gets each call while its tensors are alive; reduce them at once, keep none. It runs without
            gradient, autocast and modes.
        operations: whether to watch every operation below Python, too, so that the audit lists whatever looks
            like attention and was not captured. Slower.

    Yields:
        The audit: which modules have attention, what was captured and what was not. It fills while the model
        runs; the modules of a model of semdiag_models are known from the start.
    """
    recorder = Recorder(model, consume)

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        if not recorder.enter(module):
            return
        if isinstance(module, AttentionCore):
            recorder.covered += 1
        elif isinstance(module, torch.jit.ScriptModule):
            recorder.skip("jit graph", "operations of a scripted or traced module cannot be seen")

    def after(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        name = recorder.module
        if recorder.leave(module) and isinstance(module, AttentionCore):
            recorder.covered -= 1
            if isinstance(output, torch.Tensor) and not recorder.covered:  # None after an exception
                recorder.record(core_call(name, module, inputs, output))

    with ExitStack() as stack:
        stack.callback(recorder.close)
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.callback(register_module_forward_hook(after, always_call=True).remove)
        stack.enter_context(intercepted_interface(recorder))
        stack.enter_context(_uncompiled())
        if operations:
            stack.enter_context(watched_operations(recorder))
        stack.enter_context(FunctionWatch(recorder, everything=operations))
        yield recorder.audit


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled functions as they were written: inside a compiled graph there is nothing to see."""
    if not any(name in sys.modules for name in _COMPILERS):  # nothing is compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")  # ours, and they may
        yield
