"""What is captured on another device than the CPU: the same."""

import copy

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag import Monitor

pytestmark = pytest.mark.device
B, L, D = 3, 10, 16


class ByHand(nn.Module):
    """Attention from products and a softmax, causal, with a mask of tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(20, D), nn.Linear(D, 3 * D)

    def forward(self, ids, attention_mask):
        q, k, v = (x.unflatten(-1, (2, D // 2)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        scores = q @ k.mT / (D // 2) ** 0.5
        seen = torch.ones(L, L, dtype=torch.bool, device=ids.device).tril() & attention_mask[:, None, None].bool()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(-2)


class Fused(ByHand):
    """The same through scaled_dot_product_attention."""

    def forward(self, ids, attention_mask):
        q, k, v = (x.unflatten(-1, (2, D // 2)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        seen = torch.ones(L, L, dtype=torch.bool, device=ids.device).tril() & attention_mask[:, None, None].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(-2)


class Layered(nn.Module):
    """torch's own encoder."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, D)
        layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids, attention_mask):
        return self.encoder(self.embed(ids), src_key_padding_mask=attention_mask == 0)


class MaskElsewhere(ByHand):
    """Is given its mask on the CPU, as a model spread over devices may be, and moves it."""

    def forward(self, ids, attention_mask):
        return super().forward(ids, attention_mask.to(ids.device))


def inputs(device, mask_device=None):
    ids = torch.randint(1, 20, (B, L), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, L, dtype=torch.int64)
    mask[1, 7:] = 0
    return {"ids": ids.to(device), "attention_mask": mask.to(mask_device or device)}


def made(kind):
    torch.manual_seed(0)
    return kind().eval()


def tables(model, batch, **options):
    with semdiag.capture(model, k=3, **options) as calls, torch.no_grad():
        model(**batch)
    residual = calls.residual.drop(columns="residual_over_rounding")  # which is rounding, another on each device
    listed = calls.dispersion(k=[2, 3]), calls.separation(k=3), calls.loads(k=3), residual, calls.audit
    return [table.reset_index(drop=True) for table in listed]


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        pd.testing.assert_frame_equal(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [ByHand, Fused, Layered, MaskElsewhere])
@pytest.mark.parametrize("options", [{}, {"queries": 4}], ids=["all", "drawn"])
def test_attention_is_captured_alike_on_another_device(other_device, kind, options):
    model = made(kind)
    elsewhere = copy.deepcopy(model).to(other_device)
    there = inputs(other_device, "cpu" if kind is MaskElsewhere else None)
    one, other = tables(model, inputs("cpu"), **options), tables(elsewhere, there, **options)
    assert len(one[0])
    assert_same(one, other)


@pytest.mark.parametrize("kind", [ByHand, Fused, Layered])
@pytest.mark.parametrize("keep", [semdiag.TopK(3), semdiag.RandomK(3)], ids=["top", "random"])
def test_a_model_is_masked_alike_on_another_device(other_device, kind, keep):
    model = made(kind)
    outputs = []
    for device in ("cpu", other_device):
        here = copy.deepcopy(model).to(device)
        with semdiag.sparsify(here, keep), torch.no_grad():
            outputs.append(here(**inputs(device)).cpu())
    real = inputs("cpu")["attention_mask"].bool()
    torch.testing.assert_close(outputs[1][real], outputs[0][real], rtol=1e-4, atol=1e-5)


def test_a_training_loop_is_monitored_alike_on_another_device(other_device):
    seen = []
    for device in ("cpu", other_device):
        model = made(ByHand).to(device).train()
        with Monitor(model, every=1, k=[3]) as monitor:
            for _ in range(2):
                model(**inputs(device)).square().mean().backward()
        seen.append(monitor.table)
    assert len(seen[0])
    pd.testing.assert_frame_equal(*seen, rtol=1e-4, atol=1e-5)


class Spread(nn.Module):
    """Two layers on two devices, as ``device_map`` places them: what runs is moved to where a layer is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Fused(), Fused()

    def forward(self, ids, attention_mask):
        for part in (self.first, self.second):
            place = part.embed.weight.device
            out = part(ids.to(place), attention_mask.to(place))
        return out


def test_a_model_over_two_devices_is_measured_and_masked_where_its_layers_are(other_device, monkeypatch):
    from semdiag.questions.k_sweep import top_scores

    torch.manual_seed(0)
    model = Spread().eval()
    spread = copy.deepcopy(model)
    spread.second.to(other_device)
    batch = {"ids": torch.randint(20, (B, L)), "attention_mask": torch.ones(B, L, dtype=torch.int64)}
    batch["attention_mask"][1, 7:] = 0
    for held in (10**9, 400):  # all queries, and a sample beside totals
        monkeypatch.setattr(top_scores, "_MOST_NUMBERS", held)
        one, two = (
            semdiag.k_sweep(each, [batch], ks=(2,), rerun=True, kinds=("topk",)) for each in (model, spread)
        )
        for name in ("queries", "loads", "calls", "sweep", "rerun"):
            pd.testing.assert_frame_equal(getattr(one, name), getattr(two, name), rtol=1e-4, atol=1e-5)
    tables = []
    for each in (model, spread):
        with torch.no_grad(), semdiag.capture(each, k=2) as calls:
            each(**batch)
        tables.append(calls.dispersion(2))
    pd.testing.assert_frame_equal(*tables, rtol=1e-4, atol=1e-5)
