"""Watch the blocks of an encoder while it runs: the input of each of their parts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag_models import Encoder


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One pass of a batch through one block, in evaluation mode; tensors (B, L, d) unless said otherwise."""

    layer: int  # position of the block, from 0
    stream: Tensor  # the residual stream at the block's input; in a pre-norm block the first normalisation sees it
    tokens: Tensor  # the attention's input
    attention: AttentionCall  # the attention call
    middle: Tensor  # stream plus the attention's output
    mlp_tokens: Tensor  # the MLP's input
    hidden: Tensor  # (B, L, mlp width), input of the MLP's second matrix
    end: Tensor  # the MLP's output plus what it is added to; in a post-norm block the second normalisation sees it


@contextmanager
def watch_blocks(encoder: Encoder, consume: Callable[[BlockCall], None]) -> Iterator[None]:
    """Call ``consume`` for every block that a batch passes, inside the context."""
    seen: dict[str, Any] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = inputs[0]

        return hook

    def attended(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["middle"] = seen["stream"] + output

    def ended(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["end"] = seen["middle" if encoder.config.norm == "pre" else "mlp_tokens"] + output

    def finish(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            call = BlockCall(layer=layer, **seen)
            seen.clear()
            consume(call)

        return hook

    with ExitStack() as hooks:
        hooks.enter_context(watch_attention(encoder, lambda call: seen.update(attention=call)))
        for layer, block in enumerate(encoder.blocks):
            attention, expand, contract = (block.get_submodule(n) for n in ("attention", "expand", "contract"))
            for handle in (
                block.register_forward_pre_hook(keep("stream")),
                attention.register_forward_pre_hook(keep("tokens")),
                attention.register_forward_hook(attended),
                expand.register_forward_pre_hook(keep("mlp_tokens")),
                contract.register_forward_pre_hook(keep("hidden")),
                contract.register_forward_hook(ended),
                block.register_forward_hook(finish(layer)),
            ):
                hooks.callback(handle.remove)
        hooks.callback(seen.clear)
        yield
