"""Looking below Python: every operation that looks like attention and runs unseen by the other mechanisms."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.recording import Recorder

_ATTENTIVE = ("_softmax", "_safe_softmax", "_flash_attention_forward", "_efficient_attention_forward")
_PREFIXES = ("_scaled_dot_product_", "_transformer_encoder_layer", "_native_multi_head", "flex_attention")


class _OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        recorder = self._recorder
        if recorder.listening and not recorder.in_function and (name in _ATTENTIVE or name.startswith(_PREFIXES)):
            recorder.skip(name, "runs below Python: in a compiled, traced or exported graph, or in C++")
        before, recorder.in_function = recorder.in_function, True  # the operator is a Python function, too
        try:
            return func(*args, **(kwargs or {}))
        finally:
            recorder.in_function = before


@contextlib.contextmanager
def watched_operations(recorder: Recorder) -> Iterator[None]:
    """Note in the audit what looks like attention and reaches no other mechanism.

    Args:
        recorder: knows what is covered; gets the notes.

    Yields:
        Nothing.
    """
    with _OperationWatch(recorder):
        yield
