"""Parameters, or rows of them, that training leaves as they were initialised."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from semdiag_models.encoder import Encoder
from semdiag_models.training_config import TrainingConfig

Place = slice | tuple[slice, ...]


def frozen_rows(encoder: Encoder, training: TrainingConfig) -> dict[str, int]:
    """Return which parameters are frozen, and how many of their first rows.

    W_q, W_k and W_v lie one below the other in one matrix, as do their biases: ``qk`` are its first two thirds.

    Args:
        encoder: whose parameters they are.
        training: says what is frozen.

    Returns:
        Rows by the name of the parameter.

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
    """Places in parameters that a step does not move: no update, no weight decay, no memory of the optimiser's.

    Their gradient counts as 0, in the 2-norm that is clipped, too.

    Args:
        places: parameters, and in each what is frozen.
    """

    def __init__(self, places: Iterable[tuple[nn.Parameter, Place]]) -> None:
        self._places = list(places)
        self._values = [parameter.detach()[at].clone() for parameter, at in self._places]

    def drop_gradients(self) -> None:
        """Set the frozen gradients to 0: before they are clipped."""
        for parameter, at in self._places:
            if parameter.grad is not None:
                parameter.grad[at] = 0

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo what a step did at the frozen places, as weight decay does without a gradient, too."""
        for (parameter, at), value in zip(self._places, self._values, strict=True):
            parameter[at] = value
            memory: dict[str, Tensor] = optimizer.state.get(parameter, {})
            for quantity in memory.values():
                if quantity.shape == parameter.shape:
                    quantity[at] = 0
