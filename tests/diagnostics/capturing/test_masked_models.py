"""Outputs and gradients of masked models against dense float64 in which keys are chosen row by row."""

import architectures as toys
import masked_models
import pytest
import torch

from semdiag import RandomK, TopK, TopP

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.processor]
# Of float32 in two layers whose weights are 0.4 wide; a key too many or too few moves the outputs by 0.01 or more.
OUTPUTS, GRADIENTS = 3e-5, 3e-4


def test_heads_that_the_model_repeats_itself_share_their_keys_as_a_group():
    torch.manual_seed(0)
    model = masked_models.two(masked_models.repeated, 2)
    x = torch.randn(2, 9, 32)
    found = masked_models.differences(
        model,
        lambda m: m(x.to(m[0].qkv.weight.dtype)),
        None,
        2,
        [TopK(2, shared="group"), TopK(3, shared="group")],
    )
    assert found[0] < OUTPUTS
    assert found[1] < GRADIENTS


@pytest.mark.parametrize("rule", [TopK(2), TopK(1, block=2), TopP(0.6), RandomK(2)], ids=repr)
def test_a_learned_bias_keeps_its_gradient(rule):
    """T5's bias of positions reaches the interface as an option of its own."""
    pytest.importorskip("transformers")
    toy = toys.hugging_face("T5", toys.pair)
    found = masked_models.differences(toys.ready(toy), toy.run, toys.real("right", 5), 4, [rule])
    assert found[0] < OUTPUTS
    assert found[1] < GRADIENTS


@pytest.mark.slow
def test_at_least_forty_models_are_right_under_masks():
    """Each under a third of the rules, in turns; the benchmark takes all of them."""
    pytest.importorskip("transformers")
    found = list(masked_models.compared(step=3))
    assert len(found) >= 40
    assert [line for line in found if line[2] > OUTPUTS or line[3] > GRADIENTS] == []
