"""flex_attention, run for real: its rows are those of a loop that calls its functions with numbers."""

import warnings

import pytest
import torch
from residuals import recomputation_residual
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import semdiag
from semdiag.capturing.attention_calls import watch_attention

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 7, 8
SEEN = pytest.mark.skipif(
    torch.__version__ < (2, 11),
    reason="with torch 2.7 flex attention of Hugging Face's models is named as not captured",
)
TABLE = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
LENGTHS = torch.tensor([LENGTH, 4])

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:No softmax attention was captured"),
]


def causal(b, h, i, j):
    return i >= j


def padded(b, h, i, j):
    return j < LENGTHS[b]


def near(b, h, i, j):
    return (i >= j) & (i - j < 3)


def softcap(z, b, h, i, j):
    return 2 * torch.tanh(z / 2)


def by_distance(z, b, h, i, j):
    return z + 0.1 * (i - j) / (h + 1)


def from_table(z, b, h, i, j):
    return 1.5 * z + TABLE[h, i, j]


def masking(z, b, h, i, j):
    return torch.where(i >= j, z, -float("inf"))


class Attention(nn.Module):
    def __init__(self, score, mask, key_heads=HEADS, dtype=torch.float64):
        super().__init__()
        self.score, self.mask, self.sizes = score, mask, [WIDTH * n for n in (HEADS, key_heads, key_heads)]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.qkv = nn.Linear(WIDTH, sum(self.sizes), dtype=dtype)

    def split(self, x):
        return [part.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in self.qkv(x).split(self.sizes, -1)]

    def forward(self, x):
        mask = self.mask and create_block_mask(self.mask, len(x), None, LENGTH, LENGTH, device="cpu")
        grouped = self.sizes[0] > self.sizes[1]
        return flex_attention(*self.split(x), score_mod=self.score, block_mask=mask, enable_gqa=grouped)


def stream(dtype=torch.float64):
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))


def naive(model, x):
    """Dispersions of all queries, in the order of samples, heads and positions."""
    q, k, _ = model.split(x)
    found = []
    for b in range(BATCH):
        for h in range(HEADS):
            for i in range(LENGTH):
                row = []
                for j in range(LENGTH):
                    place = [torch.tensor(n) for n in (b, h, i, j)]
                    z = q[b, h, i] @ k[b, h * k.shape[1] // HEADS, j] / WIDTH**0.5
                    z = z if model.score is None else model.score(z, *place)
                    if z > -torch.inf and (model.mask is None or model.mask(*place)):
                        row.append(float(z))
                found.append(max(row) - min(row))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("score", "mask", "key_heads"),
    [
        (None, None, HEADS),
        (None, causal, HEADS),
        (None, padded, HEADS),
        (softcap, None, HEADS),
        (by_distance, causal, HEADS),
        (from_table, near, 2),
        (masking, None, 1),
    ],
)
def test_rows_are_those_of_the_functions(score, mask, key_heads):
    model, x = Attention(score, mask, key_heads), stream()
    with torch.no_grad():
        alone = model(x)
        with semdiag.capture(model) as calls:
            watched = model(x)
        expected = naive(model, x)
    assert torch.equal(alone, watched)
    assert calls.dispersion()["dispersion"].tolist() == pytest.approx(expected, abs=1e-12)
    assert calls.residual["residual"].tolist() == pytest.approx([0], abs=1e-13)
    assert calls.residual["key_heads"].tolist() == [key_heads]
    assert [text.startswith("the last keys of some") for text in calls.audit["reason"]] == [True] * (
        mask is padded
    )


@pytest.mark.parametrize("value", [-9_999.0, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("how", ["filled", "added", "multiplied"])
@pytest.mark.parametrize("mask", [None, padded])
def test_a_constant_of_minus_ten_thousand_or_less_forbids_a_key(how, value, mask):
    modifiers = {
        "filled": lambda z, b, h, i, j: torch.where(i >= j, z, value),
        "added": lambda z, b, h, i, j: z + torch.where(i >= j, 0.0, value),
        "multiplied": lambda z, b, h, i, j: torch.where(i >= j, z, 1.0) * torch.where(i >= j, 1.0, value),
    }
    score = modifiers[how]
    model, x = Attention(score, mask), stream()
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(x)

    def forbidding(z, b, h, i, j):
        return score(z, b, h, i, j) if i >= j else -torch.inf

    with torch.no_grad():
        expected = naive(Attention(forbidding, mask), x)
    assert calls.dispersion()["dispersion"].tolist() == pytest.approx(expected, abs=1e-9)
    assert calls.residual["residual"].tolist() == pytest.approx([0], abs=1e-13)
    said = sorted(text.partition(" of ")[0] for text in calls.audit["reason"])
    assert said == ["a mask"] * (value > -1e36) + ["the last keys"] * (mask is padded)


def steep(z, b, h, i, j):
    return z - 3e3 * (i - j).abs()


def test_a_term_that_falls_with_distance_is_a_bias_however_low():
    model, x = Attention(steep, None), stream()
    with torch.no_grad():
        expected = naive(model, x)
        with semdiag.capture(model) as calls:
            model(x)
    assert calls.dispersion()["dispersion"].tolist() == pytest.approx(expected, rel=1e-12)
    assert "counts as a bias" in calls.audit["reason"].item()


@pytest.mark.slow
@torch.no_grad()
def test_a_function_that_cannot_be_read_is_audited(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("unreadable")

    model, x = Attention(softcap, None), stream()
    alone = model(x)
    monkeypatch.setattr("semdiag.capturing.adapters.fused._over_all", fail)
    with semdiag.capture(model) as calls:
        assert torch.equal(model(x), alone)
    assert len(calls) == 0
    assert calls.audit["operation"].tolist() == ["flex_attention"]
    assert "unreadable" in calls.audit["reason"].iloc[0]


SHAPE = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def hugging_face(name, implementation, **options):
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = getattr(transformers, name.replace("Model", "Config").replace("ForCausalLM", "Config"))
        config = config(**{**SHAPE, **options})
        return getattr(transformers, name)._from_config(config, attn_implementation=implementation).eval()


@pytest.mark.slow
@SEEN
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaModel", {}),
        ("MistralModel", {"sliding_window": 3}),
        ("Gemma2Model", {"sliding_window": 3, "attn_logit_softcapping": 2.0, "head_dim": 12}),
        ("BertModel", {}),
    ],
)
def test_hugging_face_models_have_the_rows_of_eager(name, options, padded):
    ids = torch.randint(5, 50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, : 3 * padded] = 0
    found = {}
    for implementation in ("eager", "flex_attention"):
        model = hugging_face(name, implementation, **options)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            alone = model(ids, attention_mask=mask)[0]
            with semdiag.capture(model) as calls:
                assert torch.equal(model(ids, attention_mask=mask)[0], alone)
        assert calls.audit.empty
        assert calls.residual["residual"].max() < 1e-5
        found[implementation] = calls.dispersion()
    eager, flex = found.values()
    assert eager.drop(columns="dispersion").equals(flex.drop(columns="dispersion"))
    assert flex["dispersion"].to_numpy() == pytest.approx(eager["dispersion"].to_numpy(), abs=1e-4)


@pytest.mark.slow
@SEEN
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_generation_with_flex_attention():
    model, calls = hugging_face("LlamaForCausalLM", "flex_attention"), []
    ids = torch.randint(5, 50, (2, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert [(c.first_query, c.q.shape[2], c.k.shape[2]) for c in calls[::2]] == [(0, 4, 4), (4, 1, 5), (5, 1, 6)]
    assert max(recomputation_residual(call).residual for call in calls) < 1e-5
    assert not audit.skipped
