"""Which layers of a model use the choice of an earlier layer's indexer, and of which one?"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_INDEXER = "indexer"  # attribute of an attention of transformers; None in a layer that uses an earlier choice
_CHOICE = "prev_topk_indices"  # the argument with which it gets that choice


class ReusedChoices:
    """Watches a model, and names for each layer that reuses a choice the module that made it."""

    def __init__(self) -> None:
        self._makers: dict[str, Tensor] = {}  # last choice of each module, in the order of running
        # By layer: how many calls used the choice of a module; "" for an unknown one.
        self._uses: dict[str, Counter[str]] = {}

    @property
    def donors(self) -> dict[str, str]:
        """The module whose choice a layer uses, by layer; empty if it is unknown, or not the same in each call."""
        return {layer: next(iter(uses)) if len(uses) == 1 else "" for layer, uses in self._uses.items()}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Watch one forward pass."""
        self._makers.clear()
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if "index" in type(module).__name__.lower():
                    handle = module.register_forward_hook(partial(self._made, name))
                elif getattr(module, _INDEXER, self) is None:
                    handle = module.register_forward_pre_hook(partial(self._used, name), with_kwargs=True)
                else:
                    continue
                hooks.callback(handle.remove)
            yield

    def _made(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and not tensor.is_floating_point():
                self._makers.pop(name, None)
                self._makers[name] = tensor

    def _used(self, layer: str, module: nn.Module, inputs: object, arguments: Mapping[str, Any]) -> None:
        choice = arguments.get(_CHOICE)
        if isinstance(choice, Tensor):
            makers = [name for name, tensor in self._makers.items() if _are_same(tensor, choice)]
            self._uses.setdefault(layer, Counter())[makers[-1] if makers else ""] += 1


def _are_same(one: Tensor, another: Tensor) -> bool:
    return one is another or (one.shape == another.shape and torch.equal(one, another.to(one.dtype)))
