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
