"""Masked models against dense float64: outputs and gradients of small models under every kind of mask.

    python benchmarks/masked_models.py

The masked model runs in float32 under ``sparsify``. The reference is a copy in float64 whose softmax and fused
attention are those of tests/capture_oracle: dense, with keys chosen row by row. Models of transformers are masked
on their default attention, the reference runs on the eager one. A line a model: the largest differences of outputs
and gradients over all rules, relative to the largest value. About a minute of CPU time.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag import RandomK, TopK, TopP, Window, sparsify

sys.path.append(str(Path(__file__).parents[1] / "tests" / "capture_oracle"))
import architectures as toys
from dense_masks import DenseMask

BY_POSITION = [TopK(2, sinks=1, window=2), Window(4, sinks=1), Window(3)]  # where the queries are the keys
RULES = [TopK(3), TopK([1, 2, 3, 4]), TopK(1, block=2), TopK(1, block=3, by="best"), TopK(1, block=3, by="mean")]
RULES += [TopP(0.7), RandomK(3, seed=1), TopK(2, shared="group"), TopK(3, shared="layer")]  # type: ignore[list-item]
RULES += [TopK(3, shared="layer", every=2)]
CAUSAL = """
    GPT2 GPTNeoX OPT Llama Mistral Qwen2 Qwen3 Phi GPTJ Gemma2 Bloom Falcon Mpt CodeGen GPTBigCode Cohere Mixtral
    Olmoe Granite Phi3 StableLm Starcoder2 Persimmon Nemotron Glm GptOss DeepseekV32 GlmMoeDsa
"""
ENCODERS = "Bert Roberta DistilBert Electra XLMRoberta ModernBert MPNet DebertaV2 RoFormer Esm Ernie Camembert"
PAIRS = "Bart T5 Marian MBart Pegasus M2M100 MT5"
IMAGES = {16: "ViT DeiT Beit Dinov2", 32: "CLIPVision"}
HEADS, WIDTH = 4, 32


class ByHand(nn.Module):
    """Attention around a function of queries, keys and values (B, H, L, D)."""

    def __init__(self, attend: Callable[..., Tensor], key_heads: int) -> None:
        super().__init__()
        self.sizes = HEADS, key_heads, key_heads
        self.qkv, self.attend = nn.Linear(WIDTH, WIDTH // HEADS * sum(self.sizes)), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2).split(self.sizes, 1)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


def two(attend: Callable[..., Tensor], key_heads: int = HEADS) -> nn.Module:
    """Two layers of it."""
    model = nn.Sequential(ByHand(attend, key_heads), ByHand(attend, key_heads))
    for part in model.parameters():
        nn.init.normal_(part, std=0.4)
    return model.eval()


def future(q: Tensor) -> Tensor:
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT / 4, -1) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q * 0.3, k) + torch.zeros(()).masked_fill(future(q), -1e9)
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, dim=-1), v)


def sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places, slopes = torch.arange(q.shape[2]), 2.0 ** -torch.arange(1, 5).to(q.dtype)[:, None, None]
    scores = q @ k.mT / 4 - slopes * (places[:, None] - places).abs()
    return scores.masked_fill(future(q), -torch.inf).softmax(-1) @ v


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return (q @ k.mT / 4).masked_fill(future(q), -torch.inf).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def boolean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~future(q), scale=0.4)


Run = Callable[[nn.Module], Tensor]
Case = tuple[str, nn.Module, Run, Tensor | None, int, list[Any]]


def cases() -> Iterator[Case]:
    """Name, model, how it runs, which tokens are real, number of key heads, and rules."""
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(0))

    def on_stream(model: nn.Module) -> Tensor:
        output = model(x.to(next(model.parameters()).dtype))
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    def attention(model: nn.Module) -> Tensor:
        y = x.to(next(model.parameters()).dtype)
        return model(y, y, y)[0]  # type: ignore[no-any-return]

    def texts(names: str, inputs: Any, real: Tensor, rules: list[Any]) -> Iterator[Case]:
        for name in names.split():
            toy = toys.hugging_face(name, inputs, **toys.SPECIAL.get(name, {}))
            model = toys.ready(toy)
            named = ("num_kv_heads", "multi_query", "num_key_value_heads")  # multi-query: True is 1 head
            shared = (getattr(model.config, key, None) for key in named)
            yield name, model, toy.run, real, int(next(filter(None, shared), HEADS)), rules

    every = RULES + BY_POSITION
    for attend, key_heads in ((plain, 4), (einsums, 4), (sloped, 4), (repeated, 2), (grouped, 2), (boolean, 4)):
        yield f"{attend.__name__}, by hand", two(attend, key_heads), on_stream, None, key_heads, every
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    yield "nn.MultiheadAttention", module.eval(), attention, None, HEADS, every
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)
    yield "nn.TransformerEncoder", nn.TransformerEncoder(layer, 2).eval(), on_stream, None, HEADS, every
    yield from texts(CAUSAL, toys.left, toys.real("left"), every)
    yield from texts(ENCODERS, toys.text, toys.real(), every)
    yield from texts(PAIRS, toys.pair, toys.real("right", 5), RULES)
    for size, names in IMAGES.items():
        pixels = toys.image(size)()["pixel_values"]
        for name in names.split():
            model = toys.ready(toys.hugging_face(name, toys.image(size), **toys.SPECIAL.get(name, {})))
            yield name, model, lambda m, p=pixels: m(pixel_values=p.to(m.dtype))[0], None, HEADS, every


def result(model: nn.Module, run: Run, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs of tokens that are not padding, and gradients of a combination of them in all parameters."""
    output = run(model)
    if real is not None:
        output = output[real.bool()]
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    trained = [part for part in model.parameters() if part.requires_grad]
    found = torch.autograd.grad((output * direction).sum(), trained, allow_unused=True)
    return output.detach(), torch.cat([part.flatten() for part in found if part is not None])


def differences(model: nn.Module, run: Run, real: Tensor | None, key_heads: int, rules: list[Any]) -> list[float]:
    """Largest differences of outputs and of gradients, relative to the largest value."""
    exact: Any = copy.deepcopy(model).double()
    if hasattr(exact, "set_attn_implementation"):
        exact.set_attn_implementation("eager")
        exact.set_experts_implementation("eager")
    worst = [0.0, 0.0]
    for rule in rules:
        with sparsify(model, rule):
            mine = result(model, run, real)
        with DenseMask(rule, HEADS, key_heads, sinks=int("GptOss" in type(model).__name__)).installed():
            theirs = result(exact, run, real)
        for n, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            worst[n] = max(worst[n], float((one.double() - other).abs().max() / other.abs().max()))
    return worst


def compared(step: int = 1) -> Iterator[tuple[str, int, float, float]]:
    """Name, number of rules and differences of each model; one in ``step`` of the rules, in turns."""
    torch.manual_seed(0)
    for number, (name, model, run, real, key_heads, rules) in enumerate(cases()):
        some = rules[number % step :: step]
        outputs, gradients = differences(model, run, real, key_heads, some)
        yield name, len(some), outputs, gradients


def main() -> None:
    """Print a line a model, and the number of models."""
    print("| model | rules | outputs | gradients |\n|---|---|---|---|")
    lines = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, rules, outputs, gradients in compared():
            lines.append(max(outputs, gradients))
            print(f"| {name} | {rules} | {outputs:.1e} | {gradients:.1e} |", flush=True)
    print(f"{len(lines)} models, largest difference {max(lines):.1e}")


if __name__ == "__main__":
    main()
