"""Find the length of a model's longest attention call before anything is measured."""

from collections.abc import Sequence

import torch

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, each, longest, only_token_ids, tensors
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import running
from semdiag_models import Encoder


def longest_call(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[int, int]:
    """Return the largest number of queries, and of keys, in the attention calls on some inputs."""
    if all(map(only_token_ids, batches)):
        further = loaded.module.config.extra_tokens if isinstance(loaded.module, Encoder) else 0
        length = max(map(longest, batches), default=1) + further
        return length, length
    seen = [(1, 1)]

    def look(call: AttentionCall) -> None:
        seen.append((call.q.shape[2], call.k.shape[2]))

    with running(loaded, look, device, dtype) as run:
        run(_one_sample(max(batches, key=_largest)))
    queries, keys = zip(*seen, strict=True)
    return max(queries), max(keys)


def _largest(batch: Batch) -> int:
    """Return the size of a sample in the largest of the tensors."""
    return max((t.shape[1:].numel() for t in tensors(batch)), default=0)


def _one_sample(batch: Batch) -> Batch:
    """Return the first sample of a batch that is one tensor; several tensors may depend on each other."""
    return batch if isinstance(batch, tuple | list) or len(tensors(batch)) > 1 else next(each(batch, 1))
