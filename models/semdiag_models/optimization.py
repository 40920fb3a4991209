"""Optimisers and their state, frozen parameters, the precision of training steps, and parameters in one buffer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from semdiag_models.config import TrainingConfig
from semdiag_models.encoder import Encoder
from semdiag_models.reading import InputError

Place = slice | tuple[slice, ...]
OptimizerState = dict[str, dict[str, Tensor]]  # by parameter, then by quantity; empty for plain SGD

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def make_optimizer(parameters: Iterable[Tensor], training: TrainingConfig) -> torch.optim.Optimizer:
    """Return the configured optimiser, with one fused update for all parameters (``foreach``)."""
    options: dict[str, Any] = {"lr": training.learning_rate, "foreach": True}
    if training.weight_decay is not None:
        options["weight_decay"] = training.weight_decay
    return _OPTIMIZERS[training.optimizer](parameters, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the step size of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_state(optimizer: torch.optim.Optimizer, encoder: nn.Module) -> OptimizerState:
    """Return the optimiser's state by the names of the encoder's parameters."""
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in encoder.named_parameters()
        if optimizer.state.get(parameter)
    }


def restore_optimizer_state(optimizer: torch.optim.Optimizer, encoder: nn.Module, state: OptimizerState) -> None:
    """Restore the optimiser's state."""
    parameters = dict(encoder.named_parameters())
    for name, values in state.items():
        parameter = parameters.get(name)
        for quantity, value in values.items():
            fits = parameter is not None and value.shape in (parameter.shape, torch.Size([]))
            if not fits or not value.is_floating_point():
                raise InputError(f"The optimiser's {quantity!r} of {name!r} does not fit the model.")
    if state and state.keys() != parameters.keys():
        raise InputError("The optimiser's state does not cover all parameters of the model.")
    for name, values in state.items():
        parameter = parameters[name]
        # The optimiser keeps the number of steps on the CPU.
        optimizer.state[parameter] = {
            quantity: value.clone() if value.ndim == 0 else value.to(parameter.device, copy=True)
            for quantity, value in values.items()
        }


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that the device does not have."""
    if precision == "tf32" and device.type != "cuda":
        raise InputError(f"tf32 is a precision of CUDA devices, not of {device.type}. Use float32 or bf16.")


def forward_precision(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass: for bf16 :class:`torch.autocast`, whose parameters are float32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


@contextmanager
def product_precision(precision: str) -> Iterator[None]:
    """Allow TF32 in matrix products, forward and backward, if the precision says so; restored on leaving."""
    if precision != "tf32":  # some versions of torch warn even on reading
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compile_steps(encoder: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    """Return the encoder's forward pass through :func:`torch.compile`, which also compiles the backward pass."""
    return torch.compile(encoder, mode="reduce-overhead" if device.type == "cuda" else None)


def frozen_rows(encoder: Encoder, training: TrainingConfig) -> dict[str, int]:
    """Return the frozen parameters by name, with the number of their first rows that are frozen."""
    if "qk" not in training.frozen:
        return {}
    c = encoder.config
    names = [f"blocks.{i}.attention.qkv.{part}" for i in range(c.blocks) for part in ("weight", "bias")]
    return dict.fromkeys(names, 2 * c.heads * c.head_width)


class Frozen:
    """Parts of parameters that steps do not move: no update, no weight decay, no optimiser state."""

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


_ALIGNMENT = 16  # elements: parameters begin at multiples of 64 bytes


class FlatParameters:
    """Parameters of encoders as views of one buffer, and their gradients as views of another."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self.encoders = list(encoders)
        self._places: dict[str, tuple[int, torch.Size]] = {}
        end = 0
        for name, parameter in self.encoders[0].named_parameters():
            self._places[name] = end, parameter.shape
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        weight = self.encoders[0].head.weight.detach()
        self.parameters, self.gradients = weight.new_zeros(2, len(self.encoders), end)

    def views(self, name: str) -> tuple[Tensor, Tensor]:
        """Return views of a parameter of all encoders and of its gradient; with one encoder, without its axis."""
        start, shape = self._places[name]
        end = start + shape.numel()
        size = () if len(self.encoders) == 1 else (len(self.encoders),)
        return self.parameters[:, start:end].view(*size, *shape), self.gradients[:, start:end].view(*size, *shape)

    def parts(self, rows: Tensor, i: int) -> Iterator[tuple[str, Tensor]]:
        """Yield names and views of the i-th encoder's parameters in a buffer with the layout of ``parameters``."""
        for name, (start, shape) in self._places.items():
            yield name, rows[i, start : start + shape.numel()].view(shape)

    def rows(self, name: str, count: int) -> tuple[slice, slice]:
        """Return the index of a parameter's first rows, of all encoders, in buffers like ``parameters``."""
        start, shape = self._places[name]
        return slice(None), slice(start, start + count * shape[1:].numel())

    @torch.no_grad()
    def load(self) -> None:
        """Copy the encoders' parameters into the buffer."""
        for i, encoder in enumerate(self.encoders):
            for name, part in self.parts(self.parameters, i):
                part.copy_(encoder.get_parameter(name))

    @torch.no_grad()
    def store(self, i: int) -> None:
        """Copy the i-th encoder's parameters back."""
        for name, part in self.parts(self.parameters, i):
            self.encoders[i].get_parameter(name).copy_(part)

    def clip_gradients(self, largest: float) -> None:
        """Scale each encoder's gradient to a 2-norm of at most ``largest``, as ``clip_grad_norm_`` does."""
        norms = torch.linalg.vector_norm(self.gradients, dim=1, keepdim=True)
        self.gradients.mul_((largest / (norms + 1e-6)).clamp_(max=1))
