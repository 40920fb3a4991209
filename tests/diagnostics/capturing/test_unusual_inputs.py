"""Models that run alone run under a capture too: what it cannot measure it says, and it raises nothing itself."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag.capturing import padding
from semdiag.capturing.adapters import torch_functions
from semdiag.measuring.calls import capture as capturing

pytestmark = pytest.mark.filterwarnings("ignore:No softmax attention was captured")


class Attention(nn.Module):
    """Two heads of width 4, fused or by hand; a second input gives the keys."""

    def __init__(self, fused):
        super().__init__()
        self.qkv, self.fused = nn.Linear(8, 24), fused

    def forward(self, x, other=None):
        q, k, v = self._split(x)
        if other is not None:
            _, k, v = self._split(other)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v

    def _split(self, x):
        return self.qkv(x).view(*x.shape[:-1], 3, 2, 4).permute(2, 0, 3, 1, 4)


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.randn(5, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x, memory=None):
        memory = self.memory if memory is None else memory
        return torch.softmax(x @ memory.T, -1) @ memory


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.TransformerEncoder(layer, 2).eval()


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def captured(model, *inputs):
    """The calls; asserts that the capture changes nothing."""
    with torch.no_grad():
        alone = model(*inputs)
        with semdiag.capture(model) as calls:
            watched = model(*inputs)
    assert alone.is_meta or torch.equal(alone, watched)
    assert torch._C._len_torch_function_stack() == 0
    return calls


@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 8), (2, 3, 4, 8)])
def test_a_memory_of_two_axes_serves_all_samples(shape):
    model, x = Memory(), drawn(*shape)
    memory = model.memory.clone()
    calls = captured(model, x, memory)
    scores = x @ memory.T
    expected = (scores.amax(-1) - scores.amin(-1)).flatten()
    torch.testing.assert_close(torch.tensor(calls.dispersion()["dispersion"].to_numpy()), expected)
    assert float(calls.residual["residual"].max()) < 1e-6
    calls = captured(model, x)  # its own: a codebook
    assert len(calls) == 0
    assert calls.audit["reason"].str.startswith("its keys are parameters").all()
    assert len(calls.audit) == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [((0, 4), None), ((2, 0), (2, 3)), ((2, 3), (2, 0)), ((2, 0), None)])
def test_no_sample_no_query_and_no_key_are_audited(fused, queries, keys):
    inputs = [torch.zeros(*shape, 8) for shape in (queries, keys) if shape]
    calls = captured(Attention(fused), *inputs)
    assert len(calls) == 0
    assert calls.audit["reason"].tolist() == ["has no query or no key: there is nothing to measure"]


def written_out(q, k, v):
    weights = (q @ k.mT).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


NO_WIDTH = {
    "by hand": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "three axes": lambda q, k, v: torch.bmm(torch.bmm(q[:, 0], k[:, 0].mT).softmax(-1), v[:, 0]),
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "written out": written_out,
    "fused": F.scaled_dot_product_attention,
    "fused, grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "fused, biased": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(6.0)[None]),
}


class NoWidth(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        return NO_WIDTH[self.way](x[..., :0], x[..., :0], x)


@pytest.mark.parametrize("way", NO_WIDTH)
def test_keys_of_width_zero_weigh_alike(way):
    model, x = NoWidth(way), drawn(2, 2, 6, 4)
    if torch.__version__ < "2.13" and "fused" in way:
        pytest.skip("this torch returns memory that nothing was written to")
    calls = captured(model, x)
    scores = torch.arange(6.0 if "biased" in way else 1.0).expand(6)
    rows = calls.dispersion()
    assert (rows["keys"] == 6).all()
    assert (rows["dispersion"] == float(scores[-1])).all()
    log_p = scores.log_softmax(-1)
    assert calls.entropy()["entropy"].to_numpy() == pytest.approx(-float((log_p.exp() * log_p).sum()))
    assert float(calls.residual["residual"].max()) < 1e-6
    if way == "written out":
        return
    x = x.requires_grad_()
    with semdiag.sparsify(model, semdiag.TopK(2)) as masked:
        output = model(x)
    assert set(masked.kept["most"]) == set(masked.kept["least"]) == {2}
    best = slice(4, 6) if "biased" in way else slice(0, 2)  # of equal scores, those of the first keys
    y = x.detach().double().requires_grad_()
    values = y[:, :1].expand_as(y) if "grouped" in way else y[:, 0] if way == "three axes" else y
    expected = (scores[best].double().softmax(-1) @ values[..., best, :])[..., None, :].expand(values.shape)
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=0)
    (output.square().sum() + expected.square().sum()).backward()
    torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-5, rtol=0)


def test_meta_tensors_are_audited():
    calls = captured(Attention(True).to("meta"), torch.empty(2, 3, 8, device="meta"))
    assert calls.audit["reason"].tolist() == ["meta tensors have no values"]
    assert len(captured(Attention(False).to("meta"), torch.empty(2, 3, 8, device="meta"))) == 0


class Graph(nn.Module):
    """Attention of all tokens, and a sum over neighbours whose weights are a sparse tensor."""

    def __init__(self, kind, attends=False):
        super().__init__()
        near = (drawn(4, 4) > 0).float()
        self.near = near.to_sparse_csr() if kind == "csr" else near.to_sparse()
        self.attention, self.attends = Attention(fused=False), attends

    def forward(self, x):
        x = torch.stack([self.near @ sample for sample in x])
        mixed = self.attention(x)
        if self.attends:
            weights = torch.sparse.softmax((x[0] @ x[0].T).to_sparse(), 1)
            mixed = mixed + torch.sparse.mm(weights, x[0])[:, :4]
        return mixed


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_a_sparse_tensor_beside_attention_is_no_matter(kind):
    """Each operation with it was in the audit, and ``sparsify`` refused the model."""
    model, x = Graph(kind), drawn(2, 4, 8)
    calls = captured(model, x)
    assert len(calls) == 1
    assert calls.audit.empty
    with torch.no_grad(), semdiag.sparsify(model, semdiag.TopK(4)):
        masked = model(x)
    assert torch.equal(masked, model(x))


def test_a_softmax_of_a_sparse_tensor_and_scores_that_become_one_are_audited():
    audit = captured(Graph("coo", attends=True), drawn(2, 4, 8)).audit
    assert audit["operation"].tolist() == ["_to_sparse", "softmax"]
    assert audit["reason"].str.contains("sparse").all()


class Ragged(nn.Module):
    """An encoder that is given nested tensors."""

    def __init__(self):
        super().__init__()
        self.encoder, self.after = encoder(), Attention(False)

    def forward(self, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors are a prototype
            nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        return self.after(self.encoder(nested).to_padded_tensor(0.0))


def test_nested_tensors_in_an_evaluated_encoder_are_audited_and_what_follows_is_captured():
    calls = captured(Ragged().eval(), drawn(2, 4, 8))
    assert calls.audit["operation"].tolist() == ["TransformerEncoderLayer"] * 2
    assert calls.residual["module"].tolist() == ["after"]


def test_nested_tensors_leave_nothing_behind_after_an_exception():
    model = Ragged().eval()
    with pytest.raises(IndexError), torch.no_grad(), semdiag.capture(model):
        model(drawn(1, 4, 8))
    model.encoder.layers[1].linear1 = nn.Linear(3, 3)  # does not fit
    with pytest.raises(RuntimeError), torch.no_grad(), semdiag.capture(model) as calls:
        model(drawn(2, 4, 8))
    assert torch._C._len_torch_function_stack() == 0
    assert len(captured(model.after, drawn(2, 4, 8))) == 1
    assert len(calls) == 0


def fail(*arguments, **options):
    raise RuntimeError("no space left")


@pytest.mark.parametrize(
    ("place", "name", "fused"),
    [
        (capturing, "counted_rows", True),
        (padding, "token_masks", True),
        (torch_functions, "sdpa_call", True),
        (torch_functions.SoftmaxProvenance, "follow", False),
    ],
)
def test_a_failure_of_the_capture_is_an_audit_line_and_the_model_goes_on(monkeypatch, place, name, fused):
    monkeypatch.setattr(place, name, fail)
    model = Attention(fused)
    monkeypatch.setattr(padding, "takes_masks", lambda module: True)
    calls = captured(model, drawn(2, 3, 8))
    said = "semdiag failed on it (RuntimeError: no space left): please report it"
    assert calls.audit["reason"].str.contains(said, regex=False).any()
    assert len(calls) == (name in ("token_masks", "follow"))  # attention by hand is also followed below Python


class TwoByHand(nn.Module):
    """Two layers of attention that is written out, with a mask of keys; outputs without any key are NaN."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x, real):
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(~real[:, None], -torch.inf)
            x = x + scores.softmax(-1) @ v
        return x


def test_a_sample_that_is_all_padding_hides_no_queries_and_keys_of_the_others():
    """Behind the first layer it is NaN throughout, and so is a bound on rounding that takes it in."""
    torch.manual_seed(0)
    model, x = TwoByHand().eval(), torch.randn(6, 5, 8)
    real = torch.ones(6, 5, dtype=torch.bool)
    real[2] = False
    found = []
    with torch.no_grad(), semdiag.watch_attention(model, found.append):
        assert model(x, real)[2].isnan().all()
    assert [call.factored for call in found] == [True, True]
    assert found[1].q.shape[-1] == 8
    measured = semdiag.measure(model, [(x, real)])
    assert measured.calls["width"].tolist() == [8, 8]
    assert (measured.calls["residual_over_rounding"] < 1).all()
