"""How much a head's output, and the residual stream, would change if each query kept its k largest scores."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from semdiag.capturing.adapters.attention_core import hooked_alone
from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.score_strips import Scores
from semdiag.mathematics.truncation import truncations
from semdiag.measuring.calls.counted_rows import CountedRows
from semdiag_models import Encoder

_EVERY, _STEP = 8, 4  # outputs are computed at every k up to the first, then at every fourth
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
        blocks: list[tuple[nn.Module, nn.Linear]] = []
        if isinstance(module, Encoder) and hooked_alone(module):
            blocks = [(block, module.attention(layer).out) for layer, block in enumerate(module.blocks)]
        with self.followed(blocks):
            yield

    @contextmanager
    def followed(self, blocks: Sequence[tuple[nn.Module, nn.Linear]]) -> Iterator[None]:
        """Follow the stream from block to block."""
        self._out = [out for _, out in blocks]
        with ExitStack() as stack:
            for layer, (block, _) in enumerate(blocks):
                stack.callback(block.register_forward_pre_hook(self._keep(layer)).remove)
            yield

    def _keep(self, layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._inputs[layer] = inputs[0]

        return hook

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
    call, stats = rows.call, rows.statistics
    q, k = ((x.float() if x.dtype in _HALVES else x) for x in (call.q, call.k.contiguous()))
    masks = call.allowed, call.bias, call.softcap, call.causal, call.first_query, call.queries, rows.places
    first = rows.keys.to(torch.uint8).argmax(-1)  # (B, H)
    of_call = truncations(
        Scores(q, k, call.scale, *masks), call.v, (stats.top, stats.top_keys), stats.log_sum_exp, ks, first,
        call.sinks, None if stream is None else stream[1],
    )  # fmt: skip
    ranked = stats.top_keys == first[..., None, None]
    rank = torch.where(ranked.any(-1), ranked.to(torch.uint8).argmax(-1), stats.top_keys.shape[-1])
    changes = {"head_change": of_call.change / of_call.size[..., None], "others": of_call.others}
    changes["first_rank"] = rank
    if stream is not None and of_call.projected is not None:
        size = stream[0][:, None].expand(call.q.shape[:3])
        size = size if rows.places is None else size.gather(2, rows.places.clamp(min=0))
        changes["stream_change"] = of_call.projected / size[..., None]
    return changes
