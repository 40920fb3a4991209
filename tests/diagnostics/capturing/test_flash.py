"""Flash attention and packed sequences at Hugging Face's interface.

No kernel runs on a CPU. Transformers' own code around it does: what it cuts out of a batch is given to a naive
function with the kernels' contract, and what is captured is held against what that function scored.
"""

import inspect
import math
import warnings
from collections import defaultdict

import pytest
import torch
from packaging.version import Version
from residuals import recomputation_residual

import semdiag
from semdiag.capturing.adapters import fused as flash
from semdiag.capturing.adapters.fused import InterfaceCall
from semdiag.capturing.attention_calls import watch_attention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    integration = pytest.importorskip("transformers.integrations.flash_attention")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.20"), reason="the kernels are put in place as from 5.20 on"
    ),
]
LENGTH = 9


class Kernel:
    """What flash_attn_func and flash_attn_varlen_func compute, by loops; remembers the ranges of the scores."""

    def __init__(self):
        self.ranges = []  # of each call: by (head, query in the order they were given), the dispersion

    def dense(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        deterministic=False,
    ):  # fmt: skip
        ends = [torch.arange(len(q) + 1) * x.shape[1] for x in (q, k)]
        flat = (x.flatten(0, 1) for x in (q, k, v))
        options = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
        }
        return self.ragged(*flat, *ends, q.shape[1], k.shape[1], **options).view(*q.shape[:3], -1)

    def ragged(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        out, ranges = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype), defaultdict(float)
        scale = 1 / math.sqrt(q.shape[2]) if softmax_scale is None else softmax_scale
        group = q.shape[1] // k.shape[1]
        left, right = window_size
        for s in range(len(cu_seqlens_q) - 1):
            (a, b), (c, d) = cu_seqlens_q[s : s + 2].tolist(), cu_seqlens_k[s : s + 2].tolist()
            for h in range(q.shape[1]):
                for i in range(b - a):
                    place = i + (d - c) - (b - a)
                    seen = [
                        j
                        for j in range(d - c)
                        if (not causal or j <= place)
                        and (left < 0 or j >= place - left)
                        and (right < 0 or j <= place + right)
                    ]
                    z = scale * (k[c:d, h // group][seen] @ q[a + i, h])
                    z = softcap * torch.tanh(z / softcap) if softcap else z
                    out[a + i, h] = z.softmax(0) @ v[c:d, h // group][seen]
                    ranges[h, a + i] = float(z.max() - z.min())
        self.ranges.append(ranges)
        return out

    def sorted_ranges(self):
        """Of all calls, the dispersions head by head."""
        return [[value for _, value in sorted(ranges.items())] for ranges in self.ranges]


@pytest.fixture
def kernel(monkeypatch):
    found = Kernel()
    functions = (found.dense, found.ragged, None, utils._pad_input, utils._unpad_input)
    process = utils._lazy_define_process_function(found.ragged)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: (functions, (process, None)))
    return found


def built(name, kind="Model", **options):
    shape = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "initializer_range": 0.2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**shape, **options})
        model = getattr(transformers, f"{name}{kind}")._from_config(config, attn_implementation="eager")
    model.config._attn_implementation = "flash_attention_2"  # loading it so takes the package
    return model.eval()


def tokens(batch=2):
    return torch.randint(5, 50, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


def mask(side):
    found = torch.ones(2, LENGTH, dtype=torch.int64)
    found[1, 5:] = 0
    return found if side == "right" else found.flip(1)


CUTS = torch.tensor([0, 4, 6, LENGTH], dtype=torch.int32)
PACKED = {
    "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]]),
}
CASES = {
    "causal": ("Llama", {}, {}),
    "padded right": ("Llama", {}, {"attention_mask": mask("right")}),
    "padded left": ("Llama", {}, {"attention_mask": mask("left")}),
    "window": ("Mistral", {"sliding_window": 4}, {}),
    "window, padded": ("Mistral", {"sliding_window": 4}, {"attention_mask": mask("left")}),
    "soft-cap": ("Gemma2", {"sliding_window": 4, "attn_logit_softcapping": 2.0}, {}),
    "both directions, padded": ("Bert", {}, {"attention_mask": mask("right")}),
    "packed by positions": ("Llama", {}, PACKED),
    "packed by lengths": (
        "Llama",
        {},
        {**PACKED, "cu_seq_lens_q": CUTS, "cu_seq_lens_k": CUTS, "max_length_q": 4, "max_length_k": 4},
    ),
    "packed, window": ("Mistral", {"sliding_window": 3}, PACKED),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rows_are_those_that_a_kernel_is_given(kernel, case):
    name, options, inputs = CASES[case]
    model, ids = built(name, **options), tokens(1 if "packed" in case else 2)
    with torch.no_grad():
        alone = model(ids, **inputs)[0]
        kernel.ranges.clear()
        with semdiag.capture(model) as calls:
            watched = model(ids, **inputs)[0]
    assert torch.equal(alone, watched)
    assert len(calls) == len(kernel.ranges) == 2
    assert calls.audit.empty
    assert calls.residual["residual"].max() < 1e-5
    rows = calls.dispersion()
    for number, expected in enumerate(kernel.sorted_ranges()):
        own = rows[rows["call"] == number].sort_values(["head", "sample", "query"])
        assert own["dispersion"].tolist() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_a_cache(kernel, cache, padded):
    model = built("Llama", "ForCausalLM")
    given = {"attention_mask": mask("left")} if padded else {}
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    residuals, ranges = [], []

    def consume(call):
        residuals.append(recomputation_residual(call).residual)
        ranges.append((call.first_query, call.q.shape[2]))

    with torch.no_grad(), watch_attention(model, consume) as audit:
        model.generate(tokens(), **given, **options)
    assert ranges == [(0, LENGTH)] * 2 + [(LENGTH, 1)] * 2 + [(LENGTH + 1, 1)] * 2
    assert max(residuals) < 1e-5
    assert not audit.skipped


def test_the_interface_of_the_installed_transformers_has_no_option_that_is_not_understood():
    given = inspect.signature(integration.flash_attention_forward).parameters
    own = [name for name, p in given.items() if p.kind is not p.VAR_KEYWORD]
    assert own[:4] == ["module", "query", "key", "value"]
    assert set(own[4:]) <= set(flash.OPTIONS)
    inner = inspect.signature(utils._flash_attention_forward).parameters
    assert {*flash._PACKED, "position_ids", "block_table"} <= set(inner)


def test_pages_of_a_cache_are_refused_by_name():
    q = torch.zeros(1, 2, 3, 4)
    given = InterfaceCall("", torch.nn.Identity(), "flash", q, q, q, {"cache": object()})
    with pytest.raises(flash.NotFollowedError, match="its keys are in the pages of a cache"):
        flash.flash_call(given, q.transpose(1, 2))
