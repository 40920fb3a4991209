"""What a capture cannot decide, but a reader of its tables must know, is said once a model."""

import pytest
import torch
from torch import nn

import semdiag

pytest.importorskip("transformers", reason="the models are those of transformers")
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    SamVisionConfig,
    SamVisionModel,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
}  # fmt: skip
VIRTUAL, LENGTH = 4, 7
IDS = torch.randint(1, 50, (3, LENGTH), generator=torch.Generator().manual_seed(0))
REAL = torch.arange(LENGTH) < torch.tensor([7, 5, 3])[:, None]


def bert(implementation="sdpa"):
    torch.manual_seed(0)
    return BertModel(BertConfig(**SMALL, attn_implementation=implementation)).eval()


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, pad_token_id=0)).eval()


class Prefixed(nn.Module):
    """Learned keys and values come before those of the tokens, as in prefix tuning."""

    def __init__(self, model):
        super().__init__()
        self.base_model, self.prefix = model, nn.Parameter(torch.randn(2, 2, 2, VIRTUAL, 8))

    def forward(self, input_ids, attention_mask=None):
        cache, size = DynamicCache(), (len(input_ids), -1, -1, -1)
        for layer, (k, v) in enumerate(self.prefix):
            cache.update(k.expand(size).clone(), v.expand(size).clone(), layer)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask.new_ones(len(input_ids), VIRTUAL), attention_mask], 1)
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache)


def captured(model, *batches, **options):
    """The calls, and how many lines of the audit hold each of the given words."""
    with torch.no_grad(), semdiag.capture(model, scores=True, **options) as calls:
        for batch in batches:
            model(**batch)
    return calls, lambda words: int(calls.audit["reason"].str.contains(words).sum())


@pytest.mark.parametrize("make", [lambda: bert("sdpa"), lambda: bert("eager"), llama])
@pytest.mark.parametrize("left", [False, True])
def test_the_keys_confirm_padding_behind_virtual_tokens_which_are_named_once(make, left):
    model, real = Prefixed(make()), REAL.flip(1) if left else REAL
    calls, said = captured(model, {"input_ids": IDS, "attention_mask": real.long()})
    assert (said("do not confirm"), said("virtual tokens")) == (0, 1)
    rows = calls.dispersion().query("layer == 0 and head == 0").dropna(subset="dispersion")
    assert {*zip(rows["sample"], rows["query"] - VIRTUAL, strict=True)} == {
        (int(i), int(j)) for i, j in real.nonzero()
    }
    past = real[:, None].double().expand(-1, LENGTH, -1)
    past = past.tril() if isinstance(model.base_model, LlamaForCausalLM) else past
    assert rows["keys"].tolist() == (VIRTUAL + past.sum(-1)[real]).int().tolist()


class ByHand(nn.Module):
    """A prefix that the attention holds itself; it is given a mask of the tokens alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.prefix = nn.Embedding(50, 16), nn.Parameter(torch.randn(VIRTUAL, 16))

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        keys = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        seen = nn.functional.pad(attention_mask.bool(), (VIRTUAL, 0), value=True)
        return (x @ keys.mT / 4).masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ keys


def test_a_prefix_by_hand_does_not_hide_the_padding_behind_it():
    model = ByHand()
    calls, said = captured(model, {"input_ids": IDS, "attention_mask": REAL.long()})
    assert said("do not confirm") == 0
    rows = calls.dispersion()
    x = model.embed(IDS).double()
    z = x @ torch.cat([model.prefix.double().expand(3, -1, -1), x], 1).mT / 4
    seen = nn.functional.pad(REAL, (VIRTUAL, 0), value=True)[:, None].expand(z.shape)
    low, high = z.masked_fill(~seen, torch.inf).amin(-1), z.masked_fill(~seen, -torch.inf).amax(-1)
    expected = (high - low)[REAL].detach().float()
    torch.testing.assert_close(torch.tensor(rows["dispersion"].dropna().to_numpy()), expected)


def test_keys_of_earlier_calls_are_no_virtual_tokens():
    model = llama()
    with torch.no_grad(), semdiag.capture(model) as calls:
        model.generate(IDS[:1], max_new_tokens=3, do_sample=False)
    assert not calls.audit["reason"].str.contains("virtual tokens").any()


@pytest.mark.parametrize("masked", [False, True])
def test_padding_in_front_that_no_mask_hides_is_said_once(masked):
    ids = IDS.masked_fill(~REAL.flip(1), 0)
    batch = {"input_ids": ids} | ({"attention_mask": (ids != 0).long()} if masked else {})
    _, said = captured(llama(), batch)
    assert said("begin with the padding token") == (not masked)


@pytest.mark.parametrize("size", [48, 64])
def test_windows_that_are_padded_are_said_once(size):
    torch.manual_seed(0)
    model = SamVisionModel(
        SamVisionConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=size, patch_size=8, mlp_dim=32,
            window_size=4, global_attn_indexes=[1], output_channels=8,
        )
    ).eval()  # fmt: skip
    _, said = captured(model, {"pixel_values": torch.randn(1, 3, size, size)})
    assert said("padded to a common size") == (size == 48)


def test_calls_whose_number_depends_on_the_image_are_said_to_be_pooled_by_their_order():
    torch.manual_seed(0)
    model = Qwen2_5_VisionTransformerPretrainedModel(
        Qwen2_5_VLVisionConfig(
            depth=2, hidden_size=16, num_heads=2, intermediate_size=32, out_hidden_size=16, patch_size=4,
            window_size=16, fullatt_block_indexes=[1],
        )
    ).eval()  # fmt: skip

    def image(height, width):
        return {
            "hidden_states": torch.randn(height * width, 3 * 2 * 16),
            "grid_thw": torch.tensor([[1, height, width]]),
        }

    _, said = captured(model, image(8, 8), image(8, 16))
    assert said("depends on the input") == 1
    _, said = captured(model, image(8, 8), image(8, 8))
    assert said("depends on the input") == 0
