"""Operators that are unknown and cannot be inspected below Python: which of them may be attention."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from semdiag.capturing.recording import is_plain

MAY_BE_ATTENTION = "a custom operator, which may be attention: it cannot be inspected"
MAY_BE_KERNEL = "a kernel of torch that is unknown here and may be attention: it cannot be inspected"
_KNOWN = re.compile(
    "aten|prims?|debugprims|rngprims|_native|_?quantized|quantization|sparse|mkl|mkldnn|mkldnn_prepacked|onednn|_?c10d.*"
    "|symm_mem|_dtensor|profiler|debug_mode_ops|static_runtime|inductor.*|export|torchvision|torchaudio|semdiag"
)
_ATTENTION = re.compile("attn|attention", re.IGNORECASE)
_NAMED = ({"q", "k", "v"}, {"query", "key", "value"}, {"queries", "keys", "values"})


def is_foreign(namespace: str) -> bool:
    """Return whether operators of a namespace are neither torch's nor ours."""
    return _KNOWN.fullmatch(namespace) is None


def names_attention(schema: Any) -> bool:
    """Return whether a schema names queries, keys and values."""
    names = {argument.name for argument in schema.arguments}
    return any(three <= names for three in _NAMED) or ("qkv" in names and len(schema.returns) == 1)


def is_suspect(func: Any) -> bool:
    """Return whether the schema of one of torch's own operators, otherwise unknown, fits attention."""
    schema = func._schema
    read = [a for a in schema.arguments if "Tensor" in str(a.type) and not a.is_out]
    mixes = len(read) >= 3 and torch.Tag.pointwise not in func.tags
    return mixes or names_attention(schema) or _ATTENTION.search(schema.name) is not None


def python_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str] | None:
    """Return the dispatch key and device of an operator whose kernel is written in Python."""
    with torch._C.DisableTorchFunction():  # a function mode would see every property access
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not given or not all(is_plain(t) and t.layout == torch.strided for t in given):
            return None
        device = given[0].device.type
    own = str(torch._C._dispatch_key_for_device(device))
    name = func.name()
    for key in (own, "CompositeExplicitAutograd"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            continue
        namespace, _, rest = name.partition("::")
        known = f"{namespace}/{rest}/{key}" in torch.library._impls
        return (getattr(torch._C.DispatchKey, key), device) if known else None
    return None


def may_attend(
    name: str,
    module: str,
    given: Iterable[Tensor],
    out: Iterable[Tensor],
    fixed: Callable[[Tensor], bool],
    named: bool = False,
) -> bool:
    """Return whether an operator of which we see only inputs and outputs may be attention."""
    moving = [t for t in given if is_plain(t) and t.is_floating_point() and not fixed(t)]
    made = [t for t in out if is_plain(t) and t.is_floating_point()]
    if not moving or not made:
        return False
    if _ATTENTION.search(name):
        return True
    if len(moving) < 3:
        return named and len(moving) == 1
    q, k, v = (tuple(t.shape) for t in moving[:3])
    axes = 3 if named or _ATTENTION.search(module.rpartition(".")[2]) else 4
    if not (len(q) == len(k) == len(v) >= axes and q[-1] == k[-1] and k[:-1] == v[:-1]):
        return False
    shapes, mixed = [tuple(t.shape) for t in made], (*q[:-1], v[-1])
    if mixed in shapes:
        shapes.remove(mixed)
        return k not in shapes
    return False
