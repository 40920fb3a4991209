"""Deformable attention, whose values are sampled between the places of a picture: in the audit, unlike routers."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from semdiag.capturing.attention_calls import watch_attention

WIDTH, SIDE, POINTS = 8, 5, 3
REASON = "its keys are parameters, and its values are interpolated between positions (deformable attention)"


class Deformable(nn.Module):
    """Each query weighs what it samples at some points of each of two pictures."""

    def __init__(self, values, meet):
        super().__init__()
        self.weigh, self.aim = nn.Linear(WIDTH, 2 * POINTS), nn.Linear(WIDTH, 2 * POINTS * 2)
        self.values, self.meet = values, meet

    def forward(self, x):
        batch, length, _ = x.shape
        w = self.weigh(x).softmax(-1).unflatten(-1, (2, POINTS))
        points = self.aim(x).tanh().view(batch, length, 2, POINTS, 2)
        pictures = x[:, : SIDE * SIDE].mT.reshape(batch, WIDTH, SIDE, SIDE)
        v = torch.stack([self.values(self, pictures, points[:, :, i]) for i in range(2)], -2).flatten(-2)
        return self.meet(v, w.flatten(2))


def sampled(self, pictures, points):
    return F.grid_sample(pictures, points, align_corners=False)


def expert(self, pictures, points):
    return points.new_ones(1, WIDTH, 1, POINTS) * points.sum((-1, -2))[:, None, :, None]


def summed(v, w):
    return (v * w[:, None]).sum(-1)


def built(values, meet=summed):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Deformable(values, meet), torch.randn(2, SIDE * SIDE, WIDTH)


def watched(model, context=torch.no_grad, **inputs):
    calls = []
    with context():
        before = model(**inputs)
        with watch_attention(model, calls.append) as audit:
            during = model(**inputs)
    return before, during, calls, audit


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "meet",
    [summed, lambda v, w: torch.mul(w[:, None], v).sum(dim=3), lambda v, w: (v * w[:, None]).mean(-1)],
    ids=["summed", "swapped", "averaged"],
)
def test_weights_that_meet_sampled_values_one_by_one_are_in_the_audit(meet, context):
    model, x = built(sampled, meet)
    before, during, calls, audit = watched(model, context, x=x)
    assert torch.equal(before, during)
    assert (calls, [s.reason for s in audit.skipped]) == ([], [REASON])
    assert not audit.others


def test_so_are_those_of_a_product():
    model, x = built(sampled, lambda v, w: torch.einsum("bdqp,bqp->bqd", v, w))
    audit = watched(model, x=x)[3]
    assert [s.reason[:23] for s in audit.skipped] == ["its keys are parameters"]


ROUTERS = {
    "experts": (expert, summed),
    "a statistic beside": (sampled, lambda v, w: v.sum() * w.mean((0, 1)).square().sum()),
    "an entropy": (sampled, lambda v, w: v.sum() + torch.special.entr(w).sum(-1).mean()),
    "one of the points": (sampled, lambda v, w: v[..., 0] * w[:, None, :, 0]),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_and_their_statistics_are_not(name):
    model, x = built(*ROUTERS[name])
    _, _, calls, audit = watched(model, x=x)
    assert (calls, audit.skipped, audit.others.total()) == ([], {}, 1)


def test_every_layer_of_deformable_detr_is_named():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
    )
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        num_feature_levels=1,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=3,
    )
    model = transformers.DeformableDetrModel(config).eval()
    _, _, calls, audit = watched(model, pixel_values=torch.ones(1, 3, 32, 32))
    assert [call.module for call in calls] == ["decoder.layers.0.self_attn"]
    assert {(s.module, s.reason) for s in audit.skipped} == {
        ("encoder.layers.0.self_attn", REASON),
        ("decoder.layers.0.encoder_attn", REASON),
    }
