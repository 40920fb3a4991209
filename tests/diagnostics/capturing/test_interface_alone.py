"""Models of transformers that attend through the library's interface alone are watched without modes."""

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from semdiag.capturing import attention_calls
from semdiag.capturing.adapters.hugging_face import attends_by_interface
from semdiag.capturing.attention_calls import watch_attention

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}


def made(name, implementation="sdpa", **more):
    more |= GROUPED if name in ("Llama", "Qwen3") else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more, intermediate_size=24, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()


def seen(model):
    ids = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids)
    real[1, 6:] = 0
    calls, modes = [], []
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        modes.append(len(_get_current_function_mode_stack()))
        model(input_ids=ids, attention_mask=real)
    return calls, audit, modes[0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Bert", "Olmo2", "GPTNeoX"])
def test_calls_and_audit_are_those_that_modes_see(name, implementation, monkeypatch):
    model = made(name, implementation)
    calls, audit, modes = seen(model)
    monkeypatch.setattr(attention_calls, "attends_by_interface", lambda model: False)
    others, other, more = seen(model)
    assert (modes, more) == (0, 1)
    assert len(calls) == len(others) == 2
    for one, two in zip(calls, others, strict=True):
        for field in ("q", "k", "v", "mixed", "allowed", "bias", "queries"):
            first, second = getattr(one, field), getattr(two, field)
            assert (first is None and second is None) or torch.equal(first, second)
        for field in ("module", "layer", "mechanism", "causal", "scale", "softcap"):
            assert getattr(one, field) == getattr(two, field)
    for field in ("captured", "skipped", "remarks", "others"):
        assert getattr(audit, field) == getattr(other, field)


class OfUser(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        out = self.layer(*args, **kwargs)
        return out + ((out @ out.mT).softmax(-1) @ out if isinstance(out, torch.Tensor) else 0)


def with_layer_of_user(model):
    model.layers[0] = OfUser(model.layers[0])


def with_hook(model):
    model.layers[0].register_forward_hook(lambda module, args, out: (out @ out.mT).softmax(-1) @ out)


def with_own_forward(model):
    forward = model.norm.forward
    model.norm.forward = lambda x: (x @ x.mT).softmax(-1) @ forward(x)


@pytest.mark.parametrize("change", [with_layer_of_user, with_hook, with_own_forward])
def test_attention_that_a_user_adds_is_still_seen(change):
    model = made("Llama")
    assert attends_by_interface(model)
    change(model)
    assert not attends_by_interface(model)
    calls, _, modes = seen(model)
    assert modes == 1
    assert len(calls) == 3


def test_sources_that_name_a_softmax_or_a_product_are_watched_by_modes():
    assert not attends_by_interface(made("Mixtral", num_local_experts=2))  # routers
    assert not attends_by_interface(
        transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2))
    )
    assert not attends_by_interface(nn.Linear(2, 2))
