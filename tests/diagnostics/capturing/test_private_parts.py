"""Private parts of torch and transformers: each probe holds here, and each change is said and refuses masks."""

import inspect
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import semdiag
from semdiag.capturing import patches as threads
from semdiag.capturing import private_parts as private_parts
from semdiag.capturing.private_parts import PROBES, works
from semdiag.capturing.provenance import operations as operation_plans
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag_files import InputError


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.LlamaConfig(vocab_size=60, **sizes)
    return transformers.LlamaModel._from_config(config, attn_implementation="sdpa").eval()


@pytest.fixture(autouse=True)
def tried_anew():
    private_parts._failed.cache_clear()
    private_parts._looks_up.cache_clear()
    yield
    operation_plans.plan_of.cache_clear()
    private_parts._failed.cache_clear()
    private_parts._looks_up.cache_clear()


def said(model, x, part):
    """What capture says of a part; masks are refused for the same reason."""
    with semdiag.capture(model) as calls:
        model(x)
    with pytest.raises(InputError, match=part), sparsify(model, TopK(2)):
        raise AssertionError("a mask was put on")
    return [reason for reason in calls.audit["reason"] if part in reason]


@pytest.mark.parametrize("name", PROBES)
def test_each_part_does_what_it_did(name, llama):
    assert works(PROBES[name])


def test_a_probe_that_raises_fails_and_one_that_holds_is_not_said():
    assert not works(lambda: 1 // 0)
    assert private_parts.broken_parts(nn.Sequential(Layer())) == []


def no_frames(change):
    old = inspect.unwrap(torch.utils.checkpoint.checkpoint)
    moved = types.FunctionType(old.__code__, dict(vars(torch.utils.checkpoint)), argdefs=old.__defaults__)
    moved.__kwdefaults__ = old.__kwdefaults__
    change.setattr(torch.utils.checkpoint, "checkpoint", moved)


def exit_without_flags(self, *exception):
    torch.utils._python_dispatch._pop_mode()


def without_flags(change):
    """Leave torch's flags of modes as they are when a mode ends; none is up before, whatever other tests left."""
    module = torch.utils._python_dispatch
    for name in [name for name, value in vars(module).items() if value is True and name.startswith("_is_in")]:
        change.setattr(module, name, False)
    change.setattr(TorchDispatchMode, "__exit__", exit_without_flags)


def renamed_softmax(change):
    operation_plans.plan_of.cache_clear()
    change.delitem(operation_plans._KINDS, "_softmax")


BROKEN = {
    "autograd.Function": lambda m: m.setattr(private_parts, "own_backward", lambda: None),
    "torch.utils.checkpoint": no_frames,
    "torch's number of the running backward pass": lambda m: m.setattr(
        torch._C, "_current_graph_task_id", lambda: 0
    ),
    "torch's mark of transformed tensors": lambda m: m.setattr(
        torch._C._functorch, "is_functorch_wrapped_tensor", lambda x: False
    ),
    "names of torch's operators": renamed_softmax,
    "torch's parts of composite operators": lambda m: m.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: True
    ),
    "torch's list of kernels in Python": lambda m: m.setattr(torch.library, "_impls", set()),
    "names of torch's functions": lambda m: m.setattr(F, "scaled_dot_product_attention", lambda q, k, v: q),
    "torch's stacks of modes": without_flags,
    "addresses of torch's storages": lambda m: m.setattr(private_parts, "address", id),
    "Python's threads and pools": lambda m: m.setattr(threads, "_POOLS", ()),
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_part_that_changed_is_said_and_masks_are_refused(part, monkeypatch):
    assert works(PROBES[part])
    BROKEN[part](monkeypatch)
    assert not works(PROBES[part])
    monkeypatch.undo()
    operation_plans.plan_of.cache_clear()
    monkeypatch.setitem(PROBES, part, lambda: False)
    assert len(said(nn.Sequential(Layer()), torch.ones(2, 3, 8), part)) == 1
    monitor = semdiag.Monitor(nn.Sequential(Layer()))
    with pytest.warns(UserWarning, match=part), monitor:
        monitor.model(torch.ones(2, 3, 8))


def own_update(self, keys, values, layer, *args, **kwargs):
    return keys, values


@pytest.mark.parametrize("part", private_parts._TRANSFORMERS)
def test_a_change_of_transformers_concerns_its_models_alone(part, llama, monkeypatch):
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = next(kind for kind in type(ALL_ATTENTION_FUNCTIONS).__mro__ if "get_interface" in vars(kind))
    with monkeypatch.context() as change:
        if "Cache" in part:
            change.setattr(DynamicCache, "update", own_update)
        else:
            change.setattr(kind, "look_up", kind.get_interface, raising=False)
            change.delattr(kind, "get_interface")
        assert private_parts.broken_parts(llama) == [part]
    assert len(said(llama, torch.ones(2, 3, dtype=torch.int64), part)) == 1
    assert private_parts.broken_parts(nn.Sequential(Layer())) == []


def test_a_model_that_looks_up_its_attention_elsewhere_is_said(llama):
    from transformers.models.llama import modeling_llama

    class Later(modeling_llama.LlamaAttention):
        def forward(self, *args, **kwargs):
            return ALL_ATTENTION_FUNCTIONS.look_up("sdpa")(self, *args, **kwargs)  # noqa: F821

    llama.layers[0].self_attn = Later(llama.config, 0)
    assert private_parts.broken_parts(llama) == [f"{private_parts._OLDER} (Later)"]
