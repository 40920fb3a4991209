"""What goes into the parts of a block, against the block taken apart by hand."""

import pytest
import torch
import torch.nn.functional as F

from semdiag.capturing.attention_calls import watch_blocks
from semdiag_models import Encoder


@pytest.fixture(params=["pre", "post"])
def encoder(request, tiny_config):
    return Encoder(tiny_config("topk", 3, activation="gelu", norm=request.param)).double().eval()


TOKENS = torch.tensor([[0, 1, 1, 0, 1, 2, 2], [1, 1, 0, 0, 1, 0, 1]])


def test_the_parts_are_as_in_the_block(encoder):
    calls = []
    with torch.no_grad(), watch_blocks(encoder, calls.append):
        logits = encoder(TOKENS)
    assert [call.layer for call in calls] == [call.attention.layer for call in calls] == [0, 1]
    x, valid = encoder.embed(TOKENS), encoder.valid(TOKENS)
    with torch.no_grad():
        assert torch.equal(encoder(TOKENS), logits)
        for call, block in zip(calls, encoder.blocks, strict=True):
            pre = encoder.config.norm == "pre"
            tokens = F.layer_norm(x, (16,), eps=1e-5) if pre else x
            middle = x + block.attention(tokens, valid)
            mlp_tokens = F.layer_norm(middle, (16,), eps=1e-5)
            hidden = F.gelu(block.expand(mlp_tokens))
            end = (middle if pre else mlp_tokens) + block.contract(hidden)
            expected = {"stream": x, "tokens": tokens, "middle": middle}
            expected |= {"mlp_tokens": mlp_tokens, "hidden": hidden, "end": end}
            for name, value in expected.items():
                torch.testing.assert_close(getattr(call, name), value, msg=name)
            x = block(x, valid)


def test_hooks_are_removed_also_after_an_exception(encoder):
    def refuse(call):
        raise KeyError(call.layer)

    with pytest.raises(KeyError), torch.no_grad(), watch_blocks(encoder, refuse):
        encoder(TOKENS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.modules())
