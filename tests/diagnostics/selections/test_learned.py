"""Indexers fitted to a frozen model's attention, against loops; resuming, files, the masks that they make."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.rules import ByIndexer
from semdiag.selections.learned import (
    FitOptions,
    IndexerFit,
    attention_target,
    divergence,
    low_rank_start,
    name_of_call,
)
from semdiag.selections.price import MASKS, divergence_of, price_of_indexers
from semdiag_files import InputError
from semdiag_models.selection import Indexer

SMALL = FitOptions(width=4, heads=2, passes=3, rows=8)


class TinyGPT(nn.Module):
    """Two layers of four heads on two key heads, causal; it returns logits of the next token."""

    def __init__(self, vocabulary=11, width=16, heads=4, key_heads=2, length=20):
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(nn.Linear(width, width + 2 * key_heads * width // heads) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            size = x.shape[2] // self.heads
            q, k, v = layer(x).split([x.shape[2], *[self.key_heads * size] * 2], -1)
            q, k, v = (t.view(*ids.shape, -1, size).transpose(1, 2) for t in (q, k, v))
            k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) for t in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(x.shape)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    built = TinyGPT().eval()
    with torch.no_grad():
        for layer in built.layers:
            layer.weight.mul_(4)
    return built


@pytest.fixture
def texts():
    return [torch.randint(11, (1, 16), generator=torch.Generator().manual_seed(n)) for n in range(4)]


def fitted(model, texts, options=SMALL):
    fit = IndexerFit(options)
    for text in texts:
        fit.add(model, text)
    return fit


def tensors(fit):
    return {f"{m}.{n}": t for m, indexer in fit.indexers.items() for n, t in indexer.state_dict().items()}


def naive_scores(indexer, q, k):
    """Σ_h w_h · ReLU(q_h · k / √width) of all queries and keys of one sample, in float64."""
    heads = indexer.weight.out_features
    rows = []
    for i in range(q.shape[1]):
        query = q[:, i].flatten().double()
        w = indexer.weight.weight.double() @ query + indexer.weight.bias.double()
        projected = (indexer.query.weight.double() @ query + indexer.query.bias.double()).view(heads, -1)
        row = []
        for j in range(k.shape[1]):
            key = indexer.key.weight.double() @ k[:, j].flatten().double() + indexer.key.bias.double()
            products = [max(0.0, float(projected[h] @ key) / math.sqrt(len(key))) for h in range(heads)]
            row.append(sum(float(w[h]) * products[h] for h in range(heads)))
        rows.append(row)
    return rows


@torch.no_grad()
def test_the_mask_of_an_indexer_is_that_of_a_loop(model, texts):
    """Scores, ranks (of equal ones the first key), the causal rule, and what the masked layer returns."""
    fit = fitted(model, texts[:2])
    assert list(fit.indexers) == ["", "#1"]
    k = 3
    for layer, indexer in enumerate(fit.indexers.values()):
        rules = {("", 0): semdiag.TopK(99), ("", 1): semdiag.TopK(99)} | {("", layer): ByIndexer(k, of(indexer))}
        calls = []
        with semdiag.sparsify(model, rules) as masked, watch_attention(model, calls.append):
            model(texts[3])
        call = calls[layer]
        for h in range(4):
            scores = naive_scores(indexer, call.q[0], call.k[0])
            for i in range(16):
                best = sorted(range(i + 1), key=lambda j: (-scores[i][j], j))[:k]
                z = {j: float(call.scale * call.q[0, h, i] @ call.k[0, h, j]) for j in best}
                total = sum(map(math.exp, z.values()))
                mixed = sum(math.exp(z[j]) / total * call.v[0, h, j] for j in best)
                torch.testing.assert_close(call.mixed[0, h, i], mixed, rtol=0, atol=1e-5)
        of_layer = masked.kept[masked.kept["occurrence"] == layer]
        assert (of_layer["most"] == k).all()
        assert (of_layer["least"] == 1).all()


def of(indexer):
    return lambda q, k: indexer(q, k, None)


@pytest.mark.slow
def test_a_fit_lowers_the_divergence_and_leaves_the_model_as_it_was(model, texts):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    fit = IndexerFit(replace(SMALL, passes=40, rate=0.003))
    fit.add(model, texts[0])
    first = divergence_of(model, fit.indexers, texts[1:3], 4)
    for text in texts[1:3] * 4:
        fit.add(model, text)
    assert (fit.texts, list(fit.losses)) == (9, ["", "#1"])
    last = divergence_of(model, fit.indexers, texts[1:3], 4)
    assert last < 0.9 * first
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_interrupted_fit_that_goes_on_is_the_uninterrupted_one(model, texts, tmp_path):
    through = fitted(model, texts)
    fitted(model, texts[:2]).save(tmp_path / "half.safetensors")
    torch.manual_seed(99)
    half = IndexerFit.load(tmp_path / "half.safetensors", SMALL)
    assert half.texts == 2
    for text in texts[2:]:
        half.add(model, text)
    assert tensors(half).keys() == tensors(through).keys()
    assert all(torch.equal(t, tensors(through)[name]) for name, t in tensors(half).items())


def test_held_out_texts_move_no_indexer_and_the_price_is_of_them_alone(model, texts):
    fit = fitted(model, texts[:2])
    before = {name: t.clone() for name, t in tensors(fit).items()}
    prices = [price_of_indexers(model, fit.indexers, texts[n:], 4) for n in (2, 3)]
    assert all(torch.equal(t, before[name]) for name, t in tensors(fit).items())
    assert prices[0].masks["targets"].tolist() == [30] * 6
    assert prices[1].masks["targets"].tolist() == [15] * 6
    logits = model(texts[3])[0, :-1].double()
    expected = F.cross_entropy(logits, texts[3][0, 1:], reduction="sum").item()
    assert prices[1].masks["loss"]["none"] == pytest.approx(expected, rel=1e-5)
    assert prices[1].perplexity("none") == 0


@torch.no_grad()
def test_weight_and_recall_of_an_indexers_choice_against_a_loop(model, texts):
    k = 3
    for layer in model.layers:
        layer.weight.mul_(0.25)  # sums of the weights that do not tie
    fit = fitted(model, texts[:2])
    price = price_of_indexers(model, fit.indexers, texts[3:], k)
    calls = []
    with watch_attention(model, calls.append):
        model(texts[3])
    heads = price.heads.pivot(index=["module", "head"], columns="mask", values=["kept", "recall"])
    assert len(heads) == 2 * 4
    for (module, h), row in heads.iterrows():
        call = next(call for call in calls if name_of_call(call) == module)
        scores = naive_scores(fit.indexers[module], call.q[0], call.k[0])
        z = (call.scale * call.q[0].double() @ repeated(call.k[0], 4).double().mT).tolist()
        kept = dict.fromkeys(MASKS, 0.0)
        hits = dict.fromkeys(MASKS, 0)
        for i in range(k, 16):  # with more than k keys
            weights = [softmax(of_head[i][: i + 1]) for of_head in z]
            total = [sum(w[j] for w in weights) for j in range(i + 1)]
            best = largest(weights[h], k)
            choices = {
                "indexer": largest(scores[i][: i + 1], k),
                "topk": best,
                "topk-layer": largest(total, k),
                "window": [0, 1, i],  # k - 1 first ones and the newest
            }
            for mask, chosen in choices.items():
                kept[mask] += sum(weights[h][j] for j in {*chosen})
                hits[mask] += len({*chosen} & {*best})
        for mask in choices:
            assert row["kept", mask] == pytest.approx(kept[mask] / (16 - k), abs=1e-5), mask
            assert row["recall", mask] == pytest.approx(hits[mask] / k / (16 - k), abs=1e-9), mask
        assert 0 < row["kept", "random"] < row["kept", "topk"]
    assert 0 < price.share <= 1
    assert price.divergence == pytest.approx(divergence_of(model, fit.indexers, texts[3:], k), abs=1e-9)


def softmax(z):
    return [math.exp(x) / sum(map(math.exp, z)) for x in z]


def largest(values, k):
    return sorted(range(len(values)), key=lambda j: (-values[j], j))[:k]


def repeated(keys, heads):
    return keys.repeat_interleave(heads // len(keys), 0)


def test_indexers_that_keep_all_keys_cost_nothing(model, texts):
    with pytest.raises(InputError, match="more than k = 16 keys"):
        price_of_indexers(model, fitted(model, texts[:1]).indexers, texts[3:], 16)
    price = price_of_indexers(model, fitted(model, texts[:1]).indexers, texts[3:], 15)
    assert abs(price.perplexity("indexer")) < 0.05  # the last query alone drops a key


@torch.no_grad()
def test_a_head_starts_from_the_products_of_its_heads():
    """Without biases: Σ over index heads of ReLU(P q_sum · P k / √w), each index head with a part of the heads."""
    torch.manual_seed(1)
    indexer = Indexer((4, 3), 2, 5, heads=2).double()
    with torch.no_grad():
        for layer in (indexer.query, indexer.key):
            layer.bias.zero_()
    q, k = torch.randn(1, 4, 1, 3, dtype=torch.float64), torch.randn(1, 2, 1, 3, dtype=torch.float64)
    projections = indexer.key.weight.view(5, 2, 3)
    key = sum(projections[:, g] @ k[0, g, 0] for g in range(2))
    total = 0.0
    for part in range(2):
        query = sum(projections[:, h // 2] @ q[0, h, 0] for h in range(4) if h % 2 == part)
        total += max(0.0, float(query @ key) / math.sqrt(5))
    assert float(indexer(q, k, None)) == pytest.approx(total, abs=1e-12)


@torch.no_grad()
def test_products_of_full_width_are_those_of_the_layer():
    """With the width of all key heads, an index head's products are the sums of its heads' q · (k - k̄)."""
    torch.manual_seed(2)
    q, k = torch.randn(4, 30, 3), torch.randn(2, 30, 3)
    indexer = Indexer((4, 3), 2, 6, heads=2)
    low_rank_start(indexer, q, k)
    queries = indexer.query(q.transpose(0, 1).flatten(1)).unflatten(-1, (2, 6))
    products = torch.einsum("ihw,jw->hij", queries, indexer.key(k.transpose(0, 1).flatten(1)))
    of_heads = q @ repeated(k - k.mean(1, keepdim=True), 4).mT
    torch.testing.assert_close(products, torch.stack([of_heads[[0, 2]].sum(0), of_heads[[1, 3]].sum(0)]))


@torch.no_grad()
def test_narrow_products_are_the_nearest_in_the_mean_square():
    """The error is that of the singular values left out of the matrix of all products: rank 2 has no less."""
    torch.manual_seed(3)
    q, k = (
        torch.randn(1, 200, 4) * torch.tensor([3.0, 1, 1, 0.1]),
        torch.randn(1, 200, 4) * torch.tensor([1, 2, 1, 1.0]),
    )
    indexer = Indexer((1, 4), 1, 2)
    low_rank_start(indexer, q, k)
    exact = q[0] @ (k[0] - k[0].mean(0)).mT
    error = (indexer.query(q[0]) @ indexer.key(k[0]).mT - exact).square().mean()
    values = torch.linalg.svdvals(exact.double())
    assert float(error) == pytest.approx(float(values[2:].square().sum()) / exact.numel(), rel=1e-3)


def test_indexers_begin_nearer_to_the_attention_than_at_random():
    """Planted: attention by products of rank 2; the first scores find its keys, random ones do not."""
    torch.manual_seed(4)
    q, k = torch.randn(1, 1, 40, 4) @ (torch.randn(4, 2) @ torch.randn(2, 4)), torch.randn(1, 1, 40, 4)
    target = attention_target((q @ k.mT).softmax(-1)[0].double())
    allowed = torch.ones(40, 40, dtype=torch.bool)
    best = target.topk(5).indices
    starts = [Indexer((1, 4), 1, 2) for _ in range(2)]
    low_rank_start(starts[1], q[0], k[0])
    losses, recalls = [], []
    for indexer in starts:
        scores = indexer(q, k, None)[0].detach()
        losses.append(min(float(divergence(target, f * scores, allowed)) for f in (0.01, 0.1, 0.3, 1, 3, 10)))
        recalls.append(float((best[:, :, None] == scores.topk(5).indices[:, None]).any(-1).double().mean()))
    assert losses[1] < 0.1 * losses[0]
    assert recalls[1] > recalls[0] + 0.4


def test_bad_input_is_refused_in_one_line(model, texts, tmp_path):
    fit = fitted(model, texts[:1])
    path = tmp_path / "fit.safetensors"
    fit.save(path)
    with pytest.raises(InputError, match="above 0"):
        FitOptions(width=0)
    with pytest.raises(InputError, match="k must be"):
        ByIndexer(0, of(None))
    with pytest.raises(InputError, match="was fitted with"):
        IndexerFit.load(path, replace(SMALL, width=8))
    with pytest.raises(InputError, match="safetensors"):
        fit.save(tmp_path / "fit.pt")
    with pytest.raises(InputError, match="has no indexer"):
        price_of_indexers(model, dict([*fit.indexers.items()][:1]), texts[3:], 4)
    with pytest.raises(InputError, match="shows none"):
        IndexerFit(SMALL).add(nn.Embedding(11, 4), texts[0])
    from safetensors.torch import load_file, save_file

    arrays = load_file(path)
    module = next(iter(fit.indexers))
    for damage in ("lacks", "shape", "nan", "none", "options", "texts", "moments"):
        changed = dict(arrays)
        name = f"{module}|query.weight"
        if damage == "lacks":
            del changed[name]
        elif damage == "shape":
            changed[name] = changed[name][:, :-1].contiguous()
        elif damage == "nan":
            changed[name] = torch.full_like(changed[name], math.nan)
        elif damage == "options":
            changed["fit|options"] = torch.full_like(changed["fit|options"], math.nan)
        elif damage == "texts":
            changed["fit|texts"] = changed["fit|texts"].double()
        elif damage == "moments":
            changed[f"{name}|exp_avg"] = torch.zeros(3)
        else:
            del changed["fit|options"]
        save_file(changed, tmp_path / "bad.safetensors")
        with pytest.raises(InputError) as refused:
            IndexerFit.load(tmp_path / "bad.safetensors")
        assert "\n" not in str(refused.value)
