"""In 16 bits a Hugging Face model is what transformers loads in 16 bits: rotary frequencies are not rounded."""

import copy
import warnings

import pytest
import torch

import semdiag
from semdiag.measuring.calls.running import in_evaluation, placed, unnamed

transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with positions up to 512."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes))
        place = tmp_path_factory.mktemp("llama")
        model.save_pretrained(place)
    return place


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_those_of_transformers(folder, dtype):
    ids = torch.arange(400).remainder(40)[None]
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        truth = theirs(ids).logits
        rounded = copy.deepcopy(theirs).to(dtype)(ids).logits  # what ours was: frequencies in 16 bits
    with in_evaluation(semdiag.load(f"hf:{folder}"), dtype=dtype) as (module, _, _):
        assert torch.equal(module(ids).logits, truth)
    assert not torch.equal(rounded, truth)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_there_already_is_not_copied(folder):
    model = placed(semdiag.load(f"hf:{folder}").module, dtype=torch.bfloat16)
    with in_evaluation(unnamed(model), dtype=torch.bfloat16) as (module, _, _):
        assert module is model


class Kept(torch.nn.Module):
    """A router that names what transformers keeps in float32, in any 16 bits or in float16 alone."""

    _keep_in_fp32_modules_strict = ("gate.weight", "correction")
    _keep_in_fp32_modules = ("norm",)

    def __init__(self):
        super().__init__()
        self.gate, self.norm, self.gate_proj = (
            torch.nn.Linear(6, 6),
            torch.nn.LayerNorm(6),
            torch.nn.Linear(6, 6),
        )
        self.register_buffer("correction", torch.full((6,), 1 / 3))


def test_what_transformers_keeps_in_float32_stays_so():
    single = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        state = placed(Kept(), dtype=dtype).state_dict()
        single[dtype] = {name for name, values in state.items() if values.dtype == torch.float32}
    always = {"gate.weight", "correction"}
    assert single == {
        torch.bfloat16: always, torch.float16: always | {"norm.weight", "norm.bias"}, torch.float64: set()
    }  # fmt: skip
