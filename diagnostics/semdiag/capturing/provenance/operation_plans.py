"""What can be said about an operation before it runs: its kind, and whether it calls other operations."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator

from semdiag.capturing.provenance.foreign_operators import is_foreign, is_suspect, names_attention
from semdiag.capturing.provenance.products import PRODUCTS
from semdiag.capturing.provenance.softmaxes import EXPONENTIALS, SOFTMAXES
from semdiag.capturing.provenance.tags import tensors
from semdiag.capturing.recording import is_plain

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_FUSED = ("_scaled_dot_product_", "_transformer_encoder_layer", "_native_multi_head", "flex_attention")
_OPAQUE = ("_flash_attention_forward", "_efficient_attention_forward", "_masked_softmax")
_NOISE = ("bernoulli_", "bernoulli")


class Plan(NamedTuple):
    """What is known about an operation before it runs."""

    name: str  # without namespace and overload
    kind: str
    writes: tuple[tuple[int, str], ...]  # position and name of the arguments that it writes to
    composite: bool  # whether it only calls other operations
    runs_others: bool  # whether it may call operations that can be watched
    full: str  # its name with the namespace
    named: bool  # whether it is suspect because its schema names queries, keys and values


@lru_cache(4096)
def plan_of(func: Any) -> Plan:
    """Return the plan of an operation."""
    schema = getattr(func, "_schema", None)
    arguments = [] if schema is None else enumerate(schema.arguments)
    full = func.__name__.partition(".")[0] if schema is None else schema.name
    namespace, _, name = full.rpartition("::")
    writes = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    kind = "higher order" if isinstance(func, HigherOrderOperator) and not name.startswith(_FUSED) else _kind(name)
    if kind == "other" and schema is not None:
        kind = "foreign" if is_foreign(namespace) else "suspect" if is_suspect(func) else kind
    named = kind == "suspect" and names_attention(schema)
    composite = schema is not None and has_kernel(func, COMPOSITE.name)
    return Plan(name, kind, writes, composite, composite or kind in ("higher order", "foreign"), full, named)


def is_looked_for(func: Any) -> bool:
    """Return whether an operation may be attention, or part of it, whatever its arguments."""
    return plan_of(func).kind in ("fused", "softmax", "foreign")


def composite_on(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the device on which an operation runs as a composite; None if it does not."""
    with torch._C.DisableTorchFunction():  # a function mode would see every property access
        given = [*tensors((*args, *kwargs.values()))]
        if not given or not all(is_plain(t) and t.layout == torch.strided for t in given):
            return None
        device = given[0].device.type
    return None if has_kernel(func, key_of(device)) else device


def key_of(device: str) -> str:
    """Return the name of a device's dispatch key."""
    return str(torch._C._dispatch_key_for_device(device))


def has_kernel(func: Any, key: str) -> bool:
    """Return whether an operation has its own kernel for a dispatch key."""
    name = func.name()  # some of torch's Python operators are unknown to the dispatcher
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _kind(name: str) -> str:
    if name.startswith(_FUSED) or name in _OPAQUE:
        return "fused"
    kinds = {"softmax": SOFTMAXES, "product": PRODUCTS, "exponential": EXPONENTIALS, "noise": _NOISE}
    return next((kind for kind, names in kinds.items() if name in names), "other")
