"""Where noise can enter an external model: behind its embedding of tokens, patches or the like."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from semdiag.measurement.calls.scored_rows import NotAvailableError


def embedding_of(model: nn.Module) -> nn.Module:
    """Find the module whose output are the embedded tokens.

    Args:
        model: any. Hugging Face models name theirs; else it is the first ``nn.Embedding``.

    Returns:
        The module.

    Raises:
        NotAvailableError: if there is none.
    """
    try:
        named = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, TypeError, NotImplementedError):
        named = None
    found = named if isinstance(named, nn.Module) else None
    found = found or next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
    if found is None:
        raise NotAvailableError("no embedding of tokens was found in it, behind which noise could be added")
    return found


@contextmanager
def noisy_embeddings(model: nn.Module, samples: int, add_noise: Callable[[Tensor], None]) -> Iterator[None]:
    """Make the copies in each batch of [clean samples; copies of them] noisy, behind the embedding.

    Args:
        model: whose embedding gets a hook, removed when the context is left by whatever way.
        samples: clean samples at the head of each batch.
        add_noise: called with the embedded copies, (B, …, d), which it changes.

    Yields:
        Nothing.

    Raises:
        NotAvailableError: if the model has no embedding, or its output is none of a whole batch.
    """
    place, met = embedding_of(model), []

    def perturb(module: nn.Module, inputs: object, output: object) -> object:
        if not isinstance(output, Tensor) or not output.is_floating_point() or len(output) <= samples:
            return output
        noisy = output.clone()
        add_noise(noisy[samples:])
        met.append(True)
        return noisy

    handle = place.register_forward_hook(perturb)
    try:
        yield
    finally:
        handle.remove()
    if not met:
        raise NotAvailableError("what its embedding returns is no activation per sample")
