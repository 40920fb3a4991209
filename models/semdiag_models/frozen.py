"""Freeze parameters, or rows of them, at their initialisation."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from semdiag_models.encoder import Encoder
from semdiag_models.training_config import TrainingConfig

Place = slice | tuple[slice, ...]


def frozen_rows(encoder: Encoder, training: TrainingConfig) -> dict[str, int]:
    """Return the frozen parameters by name, with the number of their first rows that are frozen.

    W_q, W_k and W_v are stacked in one matrix, as are their biases: ``qk`` is its first two thirds.

    Example:
        >>> from semdiag_models import ModelConfig
        >>> encoder = Encoder(ModelConfig(3, 2, 8, blocks=1, heads=2, head_width=4))
        >>> frozen_rows(encoder, TrainingConfig("parity", 8, 1, frozen=("qk",)))
        {'blocks.0.attention.qkv.weight': 16, 'blocks.0.attention.qkv.bias': 16}
    """
    if "qk" not in training.frozen:
        return {}
    c = encoder.config
    names = [f"blocks.{i}.attention.qkv.{part}" for i in range(c.blocks) for part in ("weight", "bias")]
    return dict.fromkeys(names, 2 * c.heads * c.head_width)


class Frozen:
    """Parts of parameters that steps do not move: no update, no weight decay, no optimiser state.

    Their gradient counts as 0, also in the norm for clipping.

    Args:
        places: parameters, with the frozen part of each.
    """

    def __init__(self, places: Iterable[tuple[nn.Parameter, Place]]) -> None:
        self._places = list(places)
        self._values = [parameter.detach()[at].clone() for parameter, at in self._places]

    def drop_gradients(self) -> None:
        """Set the frozen gradients to 0, before clipping."""
        for parameter, at in self._places:
            if parameter.grad is not None:
                parameter.grad[at] = 0

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo what a step did to the frozen parts: weight decay acts even without a gradient."""
        for (parameter, at), value in zip(self._places, self._values, strict=True):
            parameter[at] = value
            memory: dict[str, Tensor] = optimizer.state.get(parameter, {})
            for quantity in memory.values():
                if quantity.shape == parameter.shape:
                    quantity[at] = 0
