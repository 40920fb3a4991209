"""Weights of an encoder by the theory's names, with query, key and value split; encoders that can be moved."""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from semdiag.mathematics import spectral_norms
from semdiag.mathematics.censored import predicted_classes
from semdiag_files import InputError
from semdiag_models import Encoder

# Names of tensors below "blocks.T.": their name among the bounds, and their group.
_BLOCK_TENSORS = {
    "attention.q.weight": ("W_q", "qk"),
    "attention.q.bias": ("W_q", "qk"),  # the constant is for [W_q b_q]
    "attention.k.weight": ("W_k", "qk"),
    "attention.k.bias": ("b_k", "qk"),
    "attention.v.weight": ("W_v", "value-output"),
    "attention.v.bias": ("b_v", "value-output"),
    "attention.out.weight": ("W_o", "value-output"),
    "attention.out.bias": ("b_o", "value-output"),
    "expand.weight": ("W_P", "mlp-in"),
    "expand.bias": ("b_P", "mlp-in"),
    "contract.weight": ("W_R", "mlp-out"),
    "contract.bias": ("b_R", "mlp-out"),
}
_OTHER_TENSORS = {
    "embedding.weight": ("embedding", "embedding"),
    "head.weight": ("head weight", "head"),
    "head.bias": ("head bias", "head"),
}


@dataclass(frozen=True)
class NamedTensor:
    """A parameter tensor, with query, key and value split."""

    name: str  # name in the encoder's state dict, with ``qkv`` split: ``blocks.0.attention.q.weight``
    layer: int  # number of its block; -1 for the embedding and the head
    group: str  # ``qk``, ``value-output``, ``mlp-in``, ``mlp-out``, ``embedding`` or ``head``
    bound: str  # its name among the constants of Theorem 2
    values: Tensor  # view of the parameter: writing to it moves the encoder
    gradient: Tensor | None  # view of the parameter's gradient; None before a backward pass

    @property
    def part(self) -> slice:
        """Its part of the vector of all parameters of a :class:`MovableEncoder`."""
        return slice(start := self.values.storage_offset(), start + self.values.numel())


def named_tensors(encoder: Encoder) -> list[NamedTensor]:
    """Return all parameter tensors of an encoder in the order of its layers, embedding first, head last."""
    first, *last = ((name, -1, group, bound) for name, (bound, group) in _OTHER_TENSORS.items())
    blocks = [
        (f"blocks.{layer}.{name}", layer, group, f"block {layer} {bound}")
        for layer in range(len(encoder.blocks))
        for name, (bound, group) in _BLOCK_TENSORS.items()
    ]
    return [NamedTensor(*facts, *_values(encoder, facts[0])) for facts in (first, *blocks, *last)]


def _values(encoder: Encoder, name: str) -> tuple[Tensor, Tensor | None]:
    """Return a tensor and its gradient; q, k and v are thirds of one stored tensor."""
    *prefix, part, kind = name.split(".")
    if part not in ("q", "k", "v"):
        parameter = encoder.get_parameter(name)
        return parameter.detach(), parameter.grad
    parameter = encoder.get_parameter(".".join([*prefix, "qkv", kind]))
    third = "qkv".index(part)
    gradient = None if parameter.grad is None else parameter.grad.chunk(3)[third]
    return parameter.detach().chunk(3)[third], gradient


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """One block's weights and biases, float64; heads come first if a matrix belongs to a head."""

    query: Tensor  # (H, d_head, d)
    query_bias: Tensor  # (H, d_head)
    key: Tensor
    key_bias: Tensor
    value: Tensor
    value_bias: Tensor
    output: Tensor  # (H, d, d_head)
    mlp_in: Tensor
    mlp_in_bias: Tensor
    mlp_out: Tensor
    mlp_out_bias: Tensor
    scale: float  # τ / sqrt(d_head)

    @property
    def gamma(self) -> Tensor:
        """Γ per head."""
        return spectral_norms.bilinear_form_norm(self.query, self.key, self.query_bias, self.scale)

    @property
    def upsilon(self) -> Tensor:
        """Υ per head."""
        return spectral_norms.value_output_norm(self.output, self.value)

    @property
    def whole_output(self) -> Tensor:
        """‖W_o‖₂ of the whole matrix."""
        return spectral_norms.spectral_norm(torch.cat(list(self.output), dim=-1))

    def paper_code_norms(self) -> dict[str, Tensor]:
        """Return Γ and Υ per head, B_P and B_R, as the paper's released code computes them."""
        query = (self.query, self.query_bias)
        key = (self.key, self.key_bias)
        return {
            "gamma": spectral_norms.paper_code_bilinear_norm(*query, *key, self.scale),
            "upsilon": spectral_norms.paper_code_layer_norm(self.value, self.value_bias),
            "mlp_in": spectral_norms.paper_code_layer_norm(self.mlp_in, self.mlp_in_bias)[None],
            "mlp_out": spectral_norms.paper_code_layer_norm(self.mlp_out, self.mlp_out_bias)[None],
        }


def block_weights(encoder: Encoder, layer: int) -> BlockWeights:
    """Return one block's weights split into heads, float64 on the encoder's device."""
    heads = encoder.config.heads
    config = encoder.config
    named = {t.name.split(".", 2)[2]: t.values.double() for t in named_tensors(encoder) if t.layer == layer}
    rows = {
        name: torch.unflatten(named[f"attention.{part}"], 0, (heads, -1))
        for word in ("query", "key", "value")
        for name, part in ((word, f"{word[0]}.weight"), (f"{word}_bias", f"{word[0]}.bias"))
    }
    return BlockWeights(
        **rows,
        output=torch.unflatten(named["attention.out.weight"], 1, (heads, -1)).transpose(0, 1),
        mlp_in=named["expand.weight"],
        mlp_in_bias=named["expand.bias"],
        mlp_out=named["contract.weight"],
        mlp_out_bias=named["contract.bias"],
        scale=spectral_norms.score_scale(config.head_width, config.inverse_temperature),
    )


def not_finite(encoder: Encoder) -> list[str]:
    """Return the names of parameter tensors with a NaN or an infinity."""
    return [t.name for t in named_tensors(encoder) if not bool(t.values.isfinite().all())]


def embedding_scale(encoder: Encoder) -> float:
    """Return the factor on the embedding, sqrt(d)."""
    return math.sqrt(encoder.config.width)


_TOKENS = 10_000  # tokens per forward pass: about as many as fit into a core's cache


class MovableEncoder:
    """An encoder in evaluation mode whose parameters are views into one vector."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        gradients: bool = False,
    ) -> None:
        self.encoder = copy.deepcopy(encoder).to(device=device, dtype=dtype).eval().requires_grad_(gradients)
        self.encoder.zero_grad(set_to_none=True)
        parameters = list(self.encoder.parameters())
        self.vector = parameters_to_vector(parameters).detach()
        vector_to_parameters(self.vector, parameters)  # each is a view of it from now on
        self.origin = self.vector.clone()
        self.places = tuple(named_tensors(self.encoder))

    def move_to(self, point: Tensor) -> None:
        """Move the copy to a point, (n,)."""
        self.vector.copy_(point)

    def slices(self, group: str | None = None) -> list[slice]:
        """Return the positions of the tensors of a group, or of all tensors."""
        return [place.part for place in self.places if group in (None, place.group)]

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (N, classes) at the current point, in passes of about 10,000 tokens."""
        per_pass = max(1, _TOKENS // tokens.shape[1])
        return torch.cat([self.encoder(batch) for batch in torch.split(tokens, per_pass)])

    def loss_and_accuracy(self, tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return the mean cross-entropy (nats) and accuracy in [0, 1] at the current point."""
        logits = self.logits(tokens)
        is_right = predicted_classes(logits) == labels
        return float(F.cross_entropy(logits.cpu().double(), labels.cpu())), float(is_right.double().mean())


def usable_samples(
    encoder: Encoder, tokens: Tensor, labels: Tensor | None, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return the samples that have a loss: those with a token other than PAD."""
    if labels is None:
        raise InputError(
            "The loss of these inputs is unknown, because --inputs has no labels. Leave out --inputs: the run's "
            "own held-out samples have labels."
        )
    tokens = tokens.to(device, torch.int64)
    labels = labels.to(device, torch.int64)
    outside = labels[(labels < 0) | (labels >= encoder.config.classes)]
    if len(outside):
        raise InputError(
            f"Labels must be classes of the model, 0 to {encoder.config.classes - 1}. Got {int(outside[0])}."
        )
    valid = encoder.valid(tokens)
    if valid is not None:
        tokens = tokens[valid.any(-1)]
        labels = labels[valid.any(-1)]
    if not len(tokens):
        raise InputError("There is nothing to measure: no sample has a token that is not PAD.")
    return tokens, labels
