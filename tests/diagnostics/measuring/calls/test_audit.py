"""What the audit of a capture says besides what was captured."""

import pytest
import torch
import torch.nn.functional as F
from residuals import recomputation_residual
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention

WIDTH, HEADS, LENGTH = 16, 4, 6


def stream(batch=2, length=LENGTH):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self, hand=True):
        super().__init__()
        self.qkv, self.hand = nn.Linear(WIDTH, 3 * WIDTH), hand

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT).softmax(-1) @ v if self.hand else F.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).flatten(2)


def remarks(calls):
    return calls.audit.loc[calls.audit["what"] == "remark", ["module", "reason"]].values.tolist()


def test_a_linear_layer_has_no_attention():
    model = nn.Linear(WIDTH, 2)
    with pytest.warns(UserWarning, match="No softmax attention was captured"), semdiag.capture(model) as calls:
        model(stream())
    assert remarks(calls) == [["", "no softmax attention was seen while the model ran"]]
    assert calls.dispersion().empty


def test_a_capture_in_which_nothing_ran_says_nothing():
    with semdiag.capture(nn.Linear(2, 2)) as calls:
        pass
    assert calls.audit.empty


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), Attention(), nn.Linear(WIDTH, WIDTH), Attention(False)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_of_a_hybrid_it_is_said_how_many_blocks_have_no_attention():
    model = Hybrid()
    with semdiag.capture(model) as calls:
        model(stream())
    assert remarks(calls) == [["layers", "2 of 4 blocks ran without softmax attention"]]


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize("in_a_list", [True, False], ids=["list", "sequential"])
def test_blocks_in_a_sequential_are_blocks_as_well(in_a_list):
    blocks = [Block(Attention()), Block(nn.Linear(WIDTH, WIDTH)), Block(Attention(False))]
    model = Hybrid()
    model.layers = nn.ModuleList(blocks) if in_a_list else nn.Sequential(*blocks)
    with semdiag.capture(model) as calls:
        model(stream())
    assert remarks(calls) == [["layers", "1 of 3 blocks ran without softmax attention"]]
    alone = nn.Sequential(*blocks)  # the model is the list
    with semdiag.capture(alone) as calls:
        alone(stream())
    assert remarks(calls) == [["", "1 of 3 blocks ran without softmax attention"]]


def test_parts_of_a_block_in_a_sequential_are_no_blocks():
    """Attention and what follows it, and what stands before and behind the blocks."""
    mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    parts = nn.Sequential(nn.LayerNorm(WIDTH), Attention(), Block(mlp))
    model = nn.Sequential(Block(mlp), nn.Sequential(*[parts, parts]), nn.Linear(WIDTH, WIDTH))
    with semdiag.capture(model) as calls:
        model(stream())
    assert remarks(calls) == []


class CrossCovariance(nn.Module):
    """XCiT's attention: of channels to channels."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 4, 1)
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1)
        return (weights @ v).permute(0, 3, 1, 2).flatten(2)


def test_where_the_queries_are_channels_it_is_said():
    for model, said in ((CrossCovariance(), 1), (Attention(), 0)):
        with semdiag.capture(model) as calls:
            model(stream())
        assert len(calls) == 1
        assert [reason[:38] for _, reason in remarks(calls)] == ["its queries and keys are channels, not"] * said


def test_dropout_is_why_there_is_no_residual():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    with semdiag.capture(layer) as calls:
        layer(stream())
    assert calls.residual["residual"].isna().all()
    assert [reason.partition(":")[0] for _, reason in remarks(calls)] == ["dropout of 0.1 in training mode"]
    with torch.no_grad(), semdiag.capture(layer.eval()) as calls:
        layer(stream())
    assert calls.residual["residual"].max() < 1e-5
    assert remarks(calls) == []


class Dropping(nn.Module):
    """Drops weights in every mode: by the fused function, by a function behind a softmax, or by a module."""

    def __init__(self, way):
        super().__init__()
        self.way, self.map, self.drop = way, nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        q, k, v = self.map(x)[:, None].chunk(3, -1)
        if self.way == "fused":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        weights = (q @ k.mT).softmax(-1)
        return (self.drop(weights) if self.way == "module" else F.dropout(weights, 0.3)) @ v


@pytest.mark.parametrize("way", ["fused", "function", "module"])
def test_who_drops_weights_in_evaluation_mode_is_not_told_to_enter_it(way):
    """The part that drops is in training mode with a module alone."""
    model = Dropping(way).eval()
    model.drop.train(way == "module")
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(stream())
    ((_, reason),) = remarks(calls)
    assert ("evaluation mode" in reason) is (way != "module")
    assert ("model.eval()" in reason) is (way == "module")
    assert calls.residual["residual"].isna().all()


@pytest.mark.parametrize("gate", [nn.Linear(WIDTH, 3), nn.Sequential(nn.Linear(WIDTH, 3), nn.Softplus())])
@pytest.mark.parametrize("balanced", [torch.dot, lambda load, share: (load[None] * share).sum()])
def test_routers_and_their_balance_are_counted_and_no_more(gate, balanced):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = gate, nn.Parameter(torch.randn(3, WIDTH, WIDTH))
            self.attention = Attention()

        def forward(self, x):
            weights = self.gate(self.attention(x)).softmax(-1)
            weight, expert = weights.max(-1)
            load, share = F.one_hot(expert, 3).float().mean((0, 1)), weights.mean((0, 1))
            self.loss = balanced(load, share) - torch.dot(share, share.log())
            return x + weight[..., None] * torch.einsum("bld,blde->ble", x, self.experts[expert])

    model = Routed()
    with semdiag.capture(model) as calls:
        model(stream())
    assert (len(calls), calls.other_softmaxes, len(calls.audit)) == (1, 1, 0)


def test_one_softmax_is_one_call_however_often_it_is_used():
    class Twice(nn.Module):
        def forward(self, x):
            weights = (x @ x.mT).softmax(-1)
            return weights @ x + weights @ x.sin()

    model = Twice()
    with semdiag.capture(model) as calls:
        model(stream())
    assert len(calls) == 1


CODEBOOKS = {
    "cast": lambda x, table: (x.double() @ table.double().t()).softmax(-1) @ table.double(),
    "normalised": lambda x, table: (F.normalize(x, dim=-1) @ F.normalize(table, dim=-1).t()).softmax(-1) @ table,
}


@pytest.mark.parametrize("kind", CODEBOOKS)
def test_a_codebook_is_no_attention_however_it_was_prepared(kind):
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, x):
            return CODEBOOKS[kind](x, self.table)

    model, calls = Codebook(), []
    with watch_attention(model, calls.append) as audit:
        model(stream())
    assert not calls
    assert ["its keys are parameters" in seen.reason for seen in audit.skipped] == [True]


def test_attention_outside_of_the_modules_is_in_the_audit():
    model, calls = Attention(), []
    q = torch.randn(1, 2, 3, 4)
    with watch_attention(model, calls.append) as audit:
        model.forward(stream())
        F.scaled_dot_product_attention(q, q, q)
    assert not calls
    assert {seen.reason.partition(":")[0] for seen in audit.skipped} == {"runs outside the model's modules"}
    assert audit.skipped.total() == 2


def test_another_models_attention_is_nobodys_business():
    model, other, calls = Attention(), Attention(), []
    with watch_attention(model, calls.append) as audit:
        other(stream())
    assert (calls, audit.skipped) == ([], {})


def test_half_precision_has_a_residual_of_its_rounding():
    model = Attention().bfloat16()
    found = semdiag.measure(model, [stream().bfloat16()])
    residual = float(found.models["residual"].item())
    assert 1e-4 < residual < 3e-2
    assert found.provenance["dtype"] == "bfloat16"
    from semdiag.measuring.findings.findings import Findings
    from semdiag.reporting.gate import invariants
    from semdiag.reporting.page import incomplete_sentences

    findings = Findings(found)
    assert next(i for i in invariants(findings) if i.name == "residual").passed
    assert incomplete_sentences(findings) == []


def test_what_was_found_is_counted_whether_it_was_captured_or_not():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Attention(), Halved()

        def forward(self, x):
            return self.second(self.first(x))

    class Halved(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return ((q @ k.mT).softmax(-1) * 0.5 @ v).transpose(1, 2).flatten(2)

    row = semdiag.measure(Half(), [stream()]).models.iloc[0]
    assert (row["attention_found"], row["attention_captured"]) == (2, 1)


def test_a_residual_looks_at_all_samples_heads_and_queries():
    calls = []
    with torch.no_grad(), watch_attention(model := Attention(), calls.append):
        model(stream(8, 12))
    (call,) = calls
    found = []
    for sample, head, query in ((7, 3, 11), (3, 1, 6), (0, 0, 0)):
        call.mixed[sample, head, query] += 1.0
        generator = torch.Generator().manual_seed(0)
        found.append(max(recomputation_residual(call, generator).residual for _ in range(60)) > 0.1)
        call.mixed[sample, head, query] -= 1.0
    assert found == [True] * 3  # 60 times 32 of 384 rows: missed with probability (1 - 32 / 384) ** 60 = 0.5%


def test_a_call_on_which_the_capture_failed_is_in_no_table_but_the_audit(monkeypatch):
    def fail(*arguments):
        raise ValueError("unfit")

    monkeypatch.setattr("semdiag.measuring.calls.collector.residual_numbers", fail)
    model = Attention()
    with pytest.warns(UserWarning, match="No softmax attention was captured"), semdiag.capture(model) as calls:
        model(stream())
    assert calls.residual.empty
    assert calls.dispersion().empty
    assert "semdiag failed on it (ValueError: unfit)" in calls.audit["reason"].item()


class TokensFirst(nn.Module):
    """Takes (L, B, D), as torch's layers do unless told otherwise; or (B, L, D), which it turns round."""

    def __init__(self, turned=False):
        super().__init__()
        self.turned, self.layer = turned, nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.layer(x)


@pytest.mark.parametrize(("turned", "shape"), [(False, (7, 3)), (False, (3, 6)), (True, (3, 7)), (True, (7, 3))])
def test_samples_on_the_second_axis_are_no_wrong_number_of_samples(turned, shape):
    """ "The batch has 7 samples" of 7 tokens was remarked; commands, which count the first axis, say so."""
    model, x = TokensFirst(turned), torch.randn(*shape, WIDTH)
    with torch.no_grad(), semdiag.capture(model, k=1) as calls:
        model(x)
    found = calls.dispersion()
    samples, length = shape if turned else shape[::-1]
    assert (found["sample"].nunique(), found["query"].nunique()) == (samples, length)
    reasons = [reason for _, reason in remarks(calls)]
    assert [reason.partition("(")[2].partition(")")[0] for reason in reasons] == ["batch_first=False"] * (
        not turned
    )
    assert semdiag.measure(model, [x]).remarks["text"].str.contains("batch_first=False").sum() == (not turned)
