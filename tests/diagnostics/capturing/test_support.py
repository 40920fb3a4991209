"""The support matrix: what is captured of which model. Its rows are found here and stand in a fixture.

To write the file anew: SEMDIAG_WRITE_SUPPORT=1 pytest tests/diagnostics/capturing/test_support.py
"""

import importlib.metadata
import importlib.util
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from residuals import recomputation_residual
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_before

from semdiag.capturing.attention_calls import watch_attention

DOCUMENT = Path(__file__).parents[2] / "fixtures" / "support_rows.md"
BATCH, LENGTH, WIDTH, HEADS = 2, 9, 32, 4


@dataclass(frozen=True)
class Row:
    """A model, how it is run, and how many attention calls it makes in doing so."""

    build: Callable[[], nn.Module]
    calls: int
    run: Callable[[nn.Module], torch.Tensor]
    same: bool = True  # outputs to the bit
    needs: str = "torch"


def images():
    return torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def tokens():
    return torch.randint(5, 50, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def stream():
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def present(side="right"):
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 6:] = 0
    return mask if side == "right" else mask.flip(1)


# -------------------------------------------------------------------------------------------- Hugging Face


def hugging_face(name, implementation, calls, run, **options):
    shape = {
        "vocab_size": 60,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,  # scores of some size: with the usual 0.02 a missed bias would not show
    }

    def build():
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**shape, **options})
        return getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=implementation)

    return Row(build, calls, run, needs="transformers")


def text(**more):
    def run(model):
        arguments = {key: value() for key, value in more.items()}
        return model(input_ids=tokens(), **arguments)[0]

    return run


def left():
    return present("left")


GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS, "initializer_factor": 0.5}
GPT_OSS = {**GROUPED, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
}


def hugging_face_rows():
    for kind in ("sdpa", "eager"):
        yield f"GPT-2, {kind}", hugging_face("GPT2", kind, 2, text())
        yield f"BERT, padded, {kind}", hugging_face("Bert", kind, 2, text(attention_mask=present))
        yield f"Llama, grouped keys, {kind}", hugging_face("Llama", kind, 2, text(), **GROUPED)
        padded = hugging_face("Llama", kind, 2, text(attention_mask=left), **GROUPED)
        yield f"Llama, grouped keys, padded, {kind}", padded
        t5 = text(attention_mask=present, decoder_input_ids=lambda: tokens()[:, :5])
        yield f"T5, padded, {kind}", hugging_face("T5", kind, 6, t5, **T5)
        vit = hugging_face("ViT", kind, 2, lambda m: m(pixel_values=images())[0], image_size=16, patch_size=4)
        yield f"ViT, {kind}", vit
        albert = hugging_face("Albert", kind, 2, text(attention_mask=present), embedding_size=16)
        yield f"ALBERT, shared layers, padded, {kind}", albert
    gemma = hugging_face("Gemma2", "eager", 2, text(), **GROUPED, sliding_window=4, attn_logit_softcapping=2.0)
    yield "Gemma2, soft-cap, eager", gemma
    yield "gpt-oss, sinks, eager", hugging_face("GptOss", "eager", 2, text(), **GPT_OSS)
    yield "DeBERTa-v2, by hand", hugging_face("DebertaV2", "eager", 2, text(attention_mask=present), **DEBERTA)


# -------------------------------------------------------------------------------------------- torch and by hand


class Attention(nn.Module):
    """Projections around a function that attends."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), attend

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = self.attend(self, q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


def nano(self, q, k, v):
    """The branch of nanoGPT's CausalSelfAttention without flash attention."""
    seen = torch.tril(torch.ones(q.shape[2], q.shape[2])).view(1, 1, q.shape[2], q.shape[2])
    weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    weights = weights.masked_fill(seen == 0, float("-inf"))
    weights = F.dropout(F.softmax(weights, dim=-1), 0.1, self.training)
    return weights @ v


def fused(self, q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)


def early(self, q, k, v):
    return imported_before(q, k, v)


def by_hand(self, q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def einsum(self, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).div(math.sqrt(q.shape[-1])).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).transpose(1, 2)


class TimmAttention(nn.Module):
    """The code path of timm's vision_transformer.Attention, which cannot be imported without torchvision."""

    def __init__(self, fused_attn):
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = HEADS, WIDTH // HEADS, fused_attn
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm, self.norm = nn.LayerNorm(self.head_dim), nn.Identity(), nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x, attn_mask=None):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            dropout_p = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = attn if attn_mask is None else attn + attn_mask
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(self.norm(x)))


def timm_vit(fused_attn):
    def build():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import timm
        model = timm.create_model("vit_tiny_patch16_224", img_size=16, depth=2)
        for block in model.blocks:
            block.attn.fused_attn = fused_attn
        return model

    return Row(build, 2, lambda model: model(images()), needs="timm")


class SelfAttention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        padding = present() == 0
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)[0]


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def on_stream(model):
    return model(stream())


def padded_stream(model):
    return model(stream(), src_key_padding_mask=present() == 0)


def training(build):
    return lambda: build().train()


def two(attend):
    return lambda: nn.Sequential(Attention(attend), Attention(attend))


def exported():
    # Not strict, as newer torch does by default: strictly, torch 2.7 exports through its compiler, and late in a
    # long process fails. The compiler takes, for one, only eight modules of torch.nn.
    return torch.export.export(two(early)(), (stream(),), strict=False).module()


def torch_rows():
    yield "nn.TransformerEncoder, padded, train", Row(training(encoder), 2, padded_stream)
    yield "nn.TransformerEncoder, padded, eval", Row(encoder, 2, padded_stream, same=False)
    for weights in (False, True):
        name = f"nn.MultiheadAttention, need_weights={weights}, padded"
        yield f"{name}, train", Row(training(lambda w=weights: SelfAttention(w)), 1, on_stream)
        yield f"{name}, eval", Row(lambda w=weights: SelfAttention(w), 1, on_stream, same=False)
    yield "nanoGPT-like, flash", Row(two(fused), 2, on_stream)
    yield "nanoGPT-like, by hand", Row(two(nano), 2, on_stream)
    yield "scaled_dot_product_attention imported before", Row(two(early), 2, on_stream)
    yield "softmax(q @ k.T) by hand", Row(two(by_hand), 2, on_stream)
    yield "einsum by hand", Row(two(einsum), 2, on_stream)
    yield "timm's attention block, copied, fused", Row(lambda: TimmAttention(True), 1, on_stream)
    yield "timm's attention block, copied, unfused", Row(lambda: TimmAttention(False), 1, on_stream)
    yield "timm ViT, fused", timm_vit(True)
    yield "timm ViT, unfused", timm_vit(False)
    yield "compiled (aot_eager)", Row(lambda: torch.compile(two(nano)(), backend="aot_eager"), 2, on_stream, False)
    yield "exported (torch.export)", Row(exported, 2, on_stream)


ROWS = {**dict(hugging_face_rows()), **dict(torch_rows())}


@cache
def imported(package):
    """Whether a package can be imported; its warnings are its own affair."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(package)
    except ImportError:
        return False
    return True


def lacking(name):
    """Why a row cannot be as the document says with the packages that are here; empty if it can."""
    if not imported(ROWS[name].needs):
        return f"{ROWS[name].needs} cannot be imported here"
    if name.startswith("T5"):
        import transformers

        return "" if transformers.T5Model._supports_sdpa else "this T5 does not use the attention interface yet"
    return ""


@cache
def found(name, context=torch.no_grad):
    """Run a row's model with and without the watch."""
    row = ROWS[name]
    residuals, mechanisms = [], Counter()

    def consume(call):
        mechanisms[call.mechanism] += 1
        residuals.append(recomputation_residual(call))

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = row.build()
        if "train" not in name and not name.startswith("exported"):
            model.eval()
        with context():
            before = row.run(model)
            with watch_attention(model, consume) as audit:
                during = row.run(model)
            after = row.run(model)
    assert torch.equal(before, after)
    assert not any(each.over_rounding > 1 for each in residuals), residuals  # no false alarm
    return (
        mechanisms,
        max((each.residual for each in residuals), default=math.nan),
        float((before - during).abs().max() / before.abs().max()),
        audit,
    )


def below(value):
    """Round up to a power of ten from 1e-5 on: what holds on every machine."""
    return next((f"< 1e-{n}" for n in range(5, 0, -1) if value < 10.0**-n), "≥ 0.1")


def place(name):
    """The row of the table that names a model: its mechanism, and its outputs under the watch."""
    mechanisms, _, deviation, _ = found(name)
    outputs = "same to the bit" if deviation == 0 and ROWS[name].same else f"differ by {below(deviation)}"
    return f"| {', '.join(mechanisms)} | {outputs} |"


@pytest.mark.processor
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ROWS)
def test_every_call_is_captured_with_everything_it_is_made_of(name, context):
    row = ROWS[name]
    if lacking(name):
        pytest.skip(lacking(name))
    mechanisms, residual, deviation, audit = found(name, context)
    assert mechanisms.total() == row.calls, audit
    assert residual < 1e-5
    assert not audit.skipped
    assert deviation == 0 if row.same else deviation < 1e-5


@pytest.mark.slow
@pytest.mark.processor
def test_the_document_says_what_was_found():
    rows = [name for name in ROWS if not lacking(name)]
    if os.environ.get("SEMDIAG_WRITE_SUPPORT"):
        start, _, rest = DOCUMENT.read_text("utf-8").partition("<!-- rows -->\n")
        _, _, end = rest.partition("<!-- end of rows -->\n")
        versions = ", ".join(
            f"{p} {importlib.metadata.version(p).partition('+')[0]}"
            for p in ("torch", "transformers", "timm")
            if imported(p)
        )
        places = {}
        for name in rows:
            places.setdefault(place(name), []).append(name)
        table = "\n".join(f"{own} {'; '.join(names)} |" for own, names in places.items())
        missing = "; ".join(name for name in ROWS if name not in rows)
        text = (
            f"Found with {versions}, float32 on a CPU.\n\n"
            f"| mechanism | outputs under the watch | models |\n|---|---|---|\n{table}\n\n"
            f"Not run, as they need torchvision, which has no CPU build here: {missing}.\n"
        )
        DOCUMENT.write_text(f"{start}<!-- rows -->\n{text}<!-- end of rows -->\n{end}", "utf-8")
    table = DOCUMENT.read_text("utf-8").partition("<!-- rows -->\n")[2].partition("<!-- end of rows -->")[0]
    written = {}
    for line in table.splitlines():
        if line.startswith("| "):
            start, _, names = line.removesuffix(" |").rpartition(" | ")
            written |= dict.fromkeys(names.split("; "), f"{start} |")
    assert [name for name in ROWS if name not in table] == []
    assert {name: written[name] for name in rows if ROWS[name].needs != "timm"} == {
        name: place(name) for name in rows if ROWS[name].needs != "timm"
    }
