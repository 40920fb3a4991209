"""Noise on an external model's embeddings of tokens or patches, and the attention that it reaches."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.capturing.batches import Batch, named_embedding, samples_of
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.training_runs import TokenTables, token_ids

_ROUNDING = 16  # units in the last place of the largest entry, for reordered sums


@contextmanager
def noisy_embeddings(
    model: nn.Module, batch: Batch, samples: int, add_noise: Callable[[Tensor, int], None]
) -> Iterator[None]:
    """Add noise to the copies in a batch of [clean samples; their copies], after the embedding of its tokens."""
    tables = TokenTables(token_ids(batch))
    named = named_embedding(model)
    batch_samples = samples_of(batch)
    places = [part for part in model.modules() if isinstance(part, nn.Embedding) or part is named]
    if not places:
        raise NotAvailableError("it has no token embedding after which noise could be added")
    times = 0

    def perturb(module: nn.Module, inputs: object, output: object) -> object:
        nonlocal times
        if isinstance(module, nn.Embedding):
            axis = _axis_of_samples(module, tables, named)
        else:
            axis = None if times else 0  # it may contain the token embedding
        if axis is None or not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.ndim <= axis + 1 or output.shape[axis] != batch_samples:
            return output
        noisy = output.movedim(axis, 0).clone(memory_format=torch.contiguous_format)
        add_noise(noisy[samples:], times)
        times += 1
        return noisy.movedim(0, axis)

    with ExitStack() as stack:
        for place in places:
            stack.callback(place.register_forward_hook(perturb).remove)
        stack.enter_context(tables)
        yield
    if not times:
        why = "none of its embeddings looks up the input tokens, or returns an activation per sample"
        raise NotAvailableError(why)


def _axis_of_samples(module: nn.Embedding, tables: TokenTables, named: nn.Module | None) -> int | None:
    """Return the axis of samples in the output of an embedding of the batch's tokens; None if it is of others."""
    axis = tables.axis(module.weight)
    if axis is None and isinstance(named, nn.Embedding) and module.weight is named.weight:
        return 0
    return axis


_NUMBERS = (
    "its scores are known only as numbers: the products of queries and keys pass through an operation that is not "
    "followed (clamping, ReLU, squares, mixed heads), so their change under noise cannot be bounded"
)


@dataclass
class Reach:
    """Attention that the noise reaches: where queries or keys of a copy differ from the clean ones."""

    modules: dict[int, str] = field(default_factory=dict)  # module that attends, by layer
    reached: set[int] = field(default_factory=set)  # layers that the noise reaches
    numbers: set[int] = field(default_factory=set)  # layers whose scores are known only as numbers, in the bias

    def look(self, call: AttentionCall, samples: int) -> None:
        """Observe one call."""
        self.modules[call.layer] = call.module
        if call.layer not in self.reached and any(_moved(values, samples) for values in (call.q, call.k)):
            self.reached.add(call.layer)
        elif call.bias is not None and not bool(call.q.any()):
            self.numbers.add(call.layer)

    def left_out(self, name: str, note: Callable[[str, str, str], None]) -> set[int]:
        """Return the layers that the noise does not reach, which show nothing about stability."""
        out = self.modules.keys() - self.reached
        if out and not self.reached:
            why = "noise after its embedding changes no queries or keys of its attention beyond rounding"
            raise NotAvailableError(_NUMBERS if out <= self.numbers else why)
        unmoved = "noise after the embedding changes no query or key there beyond rounding"
        for layers, why in ((out & self.numbers, _NUMBERS), (out - self.numbers, unmoved)):
            if layers:
                note(name, why, ", ".join(dict.fromkeys(self.modules[n] or "the model" for n in sorted(layers))))
        return out


def _moved(values: Tensor, samples: int) -> bool:
    """Return whether a copy differs from its clean sample by more than rounding; NaN is ignored."""
    copies = values[samples:].reshape(-1, *values[:samples].shape)
    change = (copies - values[:samples]).abs().nan_to_num(0.0, torch.inf)
    size = values[:samples].abs().nan_to_num(0.0, 0.0)
    eps = min(torch.finfo(values.dtype).eps, torch.finfo(torch.float32).eps)
    return bool(change.max() > _ROUNDING * eps * size.max())
