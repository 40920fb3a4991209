"""Masks under noise: the tables against loops over single samples, and what no model may break."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.table import column_types
from semdiag.questions.mask_stability import mask_rows
from semdiag.questions.mask_stability.mask_rows import row_changes, selection_of
from semdiag.questions.mask_stability.measure import MASKS, NOISE_EFFECTS, NoisePlan, noise_tables
from semdiag.questions.stability.measure import measure_secants
from semdiag_files import InputError

SAMPLES, LENGTH, K = 7, 12, 3
LEVELS = (0.01, 0.2)
PLACE = ["level", "sample", "layer", "head", "query"]


def drawn_noise(plan, samples, width):
    """The noise of every draw, as the probe draws it: one generator per draw, samples in order."""
    seeds = torch.randint(2**62, (plan.draws,), generator=torch.Generator().manual_seed(plan.seed))
    generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
    shape = (LENGTH, width)
    return [torch.stack([torch.randn(1, *shape, generator=g, dtype=torch.float64)[0] for _ in range(samples)])
            for g in generators]  # fmt: skip


def calls_of(encoder, row, noise, plan):
    """Attention calls of one sample whose residual stream gets the noise at its start, and its logits."""
    seen = []
    valid = encoder.valid(row[None])
    with torch.no_grad(), watch_attention(encoder, seen.append):
        x = encoder.embed(row[None])
        for place, block in enumerate(encoder.blocks):
            if place == 0:
                size = x.square().mean(-1, keepdim=True).sqrt()
                x = x + size * noise
            x = block(x, valid)
        pooled = x[:, valid[0]].mean(1) if valid is not None else x.mean(1)
        return seen, encoder.head(pooled)[0]


def naive(encoder, tokens, plan):
    """Rows {(level, sample, layer, head, query): values} by loops, and logits {(level, draw or -1, sample)}."""
    noise = drawn_noise(plan, len(tokens), encoder.config.width)
    pairs, logits = {}, {}
    for sample, row in enumerate(tokens):
        clean, logits[sample] = calls_of(encoder, row, torch.zeros(LENGTH, encoder.config.width), plan)
        for level in plan.levels:
            for draw in range(plan.draws):
                noisy, logits[level, draw, sample] = calls_of(encoder, row, level * noise[draw][sample], plan)
                for layer, (a, b) in enumerate(zip(clean, noisy, strict=True)):
                    for head in range(encoder.config.heads):
                        for i in (i for i in range(LENGTH) if row[i] != 2):
                            found = row_pair(a, b, row, head, i, plan.k)
                            if found is not None:
                                pairs.setdefault((level, sample, layer, head, i), []).append(found)
    return pairs, logits


def row_pair(clean, noisy, row, head, i, k):
    valid = [j for j in range(LENGTH) if row[j] != 2]
    ends = []
    for call in (clean, noisy):
        z = {j: call.scale * float(call.q[0, head, i] @ call.k[0, head, j]) for j in valid}
        if call.selected is None:
            kept = set(sorted(valid, key=lambda j: -z[j])[:k])
            weighted = valid
        else:
            kept = weighted = {j for j in call.selected[0, head, i].tolist() if j >= 0}
        total = sum(math.exp(z[j]) for j in weighted)
        ends.append((z, kept, {j: math.exp(z[j]) / total for j in weighted}))
    (z, s, p), (z2, s2, p2) = ends
    if len(valid) <= k:
        return None
    last, first = min(s, key=lambda j: z[j]), max((j for j in valid if j not in s), key=lambda j: z[j])
    dz = {j: z2[j] - z[j] for j in valid}
    gap = z[last] - z[first]
    response = sum(abs(p.get(j, 0) - p2.get(j, 0)) for j in valid)
    certified = max(dz.values()) - min(dz.values()) < gap
    return gap, len(s & s2), certified, dz[last] - dz[first], response


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1000, 1])
@pytest.mark.parametrize("kind", ["full", "topk"])
def test_the_tables_are_as_defined(kind, wild_encoder, padded_tokens, batch_size, monkeypatch):
    if batch_size == 1:  # strips of one row of queries, too
        monkeypatch.setattr(mask_rows, "_STRIP", 1)
    encoder, (tokens, labels) = wild_encoder(kind), padded_tokens
    plan = NoisePlan(LEVELS, draws=3, k=K, seed=5)
    masks, effects = noise_tables(encoder, tokens, labels, plan, batch_size=batch_size, dtype=torch.float64)
    pairs, logits = naive(encoder, tokens, plan)
    for declared, table in ((MASKS, masks), (NOISE_EFFECTS, effects)):
        assert column_types(table) == declared.columns
    found = masks.set_index(PLACE)
    assert sorted(found.index) == sorted(pairs)
    swings = {}
    for (level, _, layer, head, _), draws in pairs.items():
        swings.setdefault((level, layer, head), []).extend(d[3] for d in draws)
    for place, row in found.iterrows():
        draws = pairs[place]
        level, _, layer, head, _ = place
        assert row["separation"] == pytest.approx(draws[0][0], abs=1e-9)
        assert row["agreement"] == pytest.approx(np.mean([d[1] for d in draws]) / K, abs=1e-6)
        assert row["exact"] == pytest.approx(np.mean([d[1] == K for d in draws]), abs=1e-6)
        assert row["certified"] == pytest.approx(np.mean([d[2] for d in draws]), abs=1e-6)
        assert row["response"] == pytest.approx(draws[0][4], abs=1e-5)
        sd = np.std(swings[level, layer, head])
        assert row["swing_sd"] == pytest.approx(sd, rel=1e-5)
        assert row["predicted"] == pytest.approx(0.5 * (1 + math.erf(row["separation"] / sd / 2**0.5)), abs=1e-5)
    assert 0 < (masks["exact"] < 1).sum() < len(masks)
    for row in effects.to_dict("records"):
        sample, clean = row["sample"], logits[row["sample"]]
        noisy = [logits[row["level"], draw, sample] for draw in range(3)]
        moved = [float((n - clean).norm() / clean.norm()) for n in noisy]
        assert row["logit_change"] == pytest.approx(np.mean(moved), rel=1e-6)
        assert row["flipped"] == pytest.approx(np.mean([int(n.argmax() != clean.argmax()) for n in noisy]))
        assert row["correct_before"] == float(clean.argmax() == labels[sample])
        assert row["correct_after"] == pytest.approx(np.mean([float(n.argmax() == labels[sample]) for n in noisy]))


@pytest.mark.processor
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.5, 1.5, 6.0])
@pytest.mark.parametrize("kind", ["full", "topk"])
def test_no_certified_row_ever_changes(kind, wild_encoder, padded_tokens, size, dtype):
    encoder = wild_encoder(kind, size)
    plan = NoisePlan((1e-8, 1e-6, 1e-4, 0.01, 0.3), draws=20, k=K)
    masks, _ = noise_tables(encoder, padded_tokens[0], None, plan, dtype=dtype)
    assert (masks["certified"] > 0).sum() > 100
    assert masks["certified_changed"].sum() == 0
    assert (masks["certified"] <= masks["exact"]).all()


@pytest.mark.parametrize("which", [0, 1])
def test_no_certified_row_of_a_trained_model_changes(tiny_models, which):
    model = tiny_models[which]
    masks, effects = noise_tables(model, *model.default_inputs(40, 0)[:2], NoisePlan(LEVELS, k=K))
    assert masks["certified_changed"].sum() == 0
    assert effects["correct_after"].between(0, 1).all()


def test_a_broken_certificate_would_be_counted(wild_encoder, padded_tokens, monkeypatch):
    monkeypatch.setattr(mask_rows, "certified", lambda change, *_: torch.ones_like(change, dtype=torch.bool))
    masks, _ = noise_tables(wild_encoder("topk"), padded_tokens[0], None, NoisePlan((0.5,), draws=2))
    assert masks["certified_changed"].sum() > 0


def test_noise_is_the_same_at_every_level_but_for_its_size(wild_encoder, padded_tokens):
    encoder, (tokens, _) = wild_encoder("full"), padded_tokens
    masks, _ = noise_tables(encoder, tokens, None, NoisePlan((1e-6, 2e-6), k=K), dtype=torch.float64)
    small, large = (rows["response"].to_numpy() for _, rows in masks.groupby("level"))
    np.testing.assert_allclose(large[small > 1e-9], 2 * small[small > 1e-9], rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_sample_has_its_own_draws_whatever_the_batch(wild_encoder, padded_tokens, dtype):
    """11 tokens of 10 numbers: not whole groups of the 16 in which torch draws."""
    encoder, tokens = wild_encoder("topk", 0.7, width=10, length=11), padded_tokens[0][:, :11]
    plan = NoisePlan((0.01,), draws=2)
    whole, parts = (
        noise_tables(encoder, tokens, None, plan, batch_size=size, dtype=dtype)[1] for size in (100, 6)
    )
    rounding = 1e-9 if dtype == torch.float64 else 1e-3  # relative to changes of a percent
    np.testing.assert_allclose(parts["logit_change"], whole["logit_change"], rtol=rounding)


def test_the_seed_decides_and_the_batch_size_does_not(wild_encoder, padded_tokens):
    encoder, (tokens, _) = wild_encoder("topk"), padded_tokens
    plan = NoisePlan(LEVELS, draws=2)
    found = [
        noise_tables(encoder, tokens, None, plan, batch_size=b, dtype=torch.float64)[0] for b in (100, 100, 5)
    ]
    assert found[0].equals(found[1])
    np.testing.assert_allclose(found[0]["agreement"], found[2]["agreement"])
    other = noise_tables(encoder, tokens, None, NoisePlan(LEVELS, draws=2, seed=1), dtype=torch.float64)[0]
    assert not found[0]["agreement"].equals(other["agreement"])


def test_the_lowest_scores_are_judged_by_their_own_rule(wild_encoder, padded_tokens):
    """Bottom-k attention on negated queries is top-k attention on the queries themselves."""
    calls = []
    encoder = wild_encoder("topk")
    tokens = padded_tokens[0][:4].repeat(3, 1)
    with torch.no_grad(), watch_attention(encoder, calls.append):
        encoder(tokens)
    for call in calls:
        negated = AttentionCall(**{**vars(call), "q": -call.q})
        ours = row_changes(call, 4, 2, 1, K, selection_of("topk"))
        theirs = row_changes(negated, 4, 2, 1, K, selection_of("bottomk"))
        for name in ("counted", "separation", "common", "certified"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert torch.equal(ours.swing[:, :, ours.counted], theirs.swing[:, :, ours.counted])


@pytest.mark.parametrize("kind", ["banded", "block"])
def test_a_fixed_mask_has_no_rows_but_its_output_is_watched(kind, wild_encoder, padded_tokens):
    masks, effects = noise_tables(wild_encoder(kind), *padded_tokens, NoisePlan((0.3,)))
    assert masks.empty
    assert list(masks) == list(MASKS.columns)
    assert len(effects) == SAMPLES
    assert (effects["logit_change"] > 0).all()


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="How entmax attention selects its keys is not known"):
        selection_of("entmax")


def test_a_mask_that_drops_nothing_has_no_rows(wild_encoder, padded_tokens):
    assert noise_tables(wild_encoder("full"), padded_tokens[0], None, NoisePlan(k=LENGTH))[0].empty


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind_even_after_an_interruption(wild_encoder, padded_tokens, untouched, error):
    encoder = wild_encoder("topk").float().train()
    check = untouched(encoder)
    noise_tables(encoder, padded_tokens[0])
    check()

    def stop(samples):
        raise error

    with pytest.raises(error):
        noise_tables(encoder, padded_tokens[0], after_batch=stop)
    check()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"levels": (0.0,)}, "noise level must be a positive"),
        ({"draws": 0}, "draws must be at least 1"),
        ({"k": 0}, "k must be at least 1"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        NoisePlan(**values)


# ------------------------------------------------------------------------------------------ models of others


class Tower(nn.Module):
    """One layer of attention in two heads over what is embedded."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Texts(nn.Module):
    """Embedded tokens and positions, one tower over them; as many positions as letters."""

    def __init__(self, first="tokens", turned=False):
        super().__init__()
        for name in sorted(("positions", "tokens"), key=lambda name: name != first):
            self.add_module(name, nn.Embedding(LENGTH, 8))
        self.tower, self.turned = Tower(), turned
        generator = torch.Generator().manual_seed(0)
        for _, p in sorted(self.named_parameters()):
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)

    def embedded(self, ids):
        x = self.tokens(ids.T).transpose(0, 1) if self.turned else self.tokens(ids)
        return x + self.positions(torch.arange(ids.shape[1]))

    def forward(self, ids):
        return self.tower(self.embedded(ids))


class Pair(Texts):
    """Pictures beside the texts, in a tower that no token enters."""

    def __init__(self):
        super().__init__()
        self.pictures = Tower().double()

    def forward(self, pixels, ids):
        return self.pictures(pixels).mean(1) + super().forward(ids).mean(1)


class Decoder(Texts):
    """Ids and a decoder's ids, both looked up in the same table by modules of their own."""

    def __init__(self):
        super().__init__()
        self.decoder = Texts()
        self.decoder.tokens.weight = self.tokens.weight

    def forward(self, input_ids, decoder_input_ids):
        return self.tower(self.embedded(input_ids)).mean(1) + self.decoder(decoder_input_ids).mean(1)


def texts(samples=5, seed=1):
    return torch.randint(LENGTH, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))


PLAN = NoisePlan((0.1,), draws=2, k=K, seed=3)


def of_others(model, batch, batch_size=100):
    return noise_tables(model, batch, plan=PLAN, batch_size=batch_size, dtype=torch.float64)[0]


@pytest.mark.parametrize(("first", "turned"), [("tokens", False), ("positions", False), ("positions", True)])
def test_noise_enters_behind_the_table_of_tokens_wherever_it_is_registered(first, turned):
    model, ids = Texts(first, turned), texts()
    found = of_others(model, ids).set_index(["sample", "head", "query"])["response"]
    x, p = model.tokens(ids), model.positions(torch.arange(LENGTH))
    noisy = x + 0.1 * x.square().mean(-1, keepdim=True).sqrt() * drawn_noise(PLAN, len(ids), 8)[0]
    weights = []
    for embedded in (x, noisy):
        q, k, _ = model.tower.qkv(embedded + p).unflatten(2, (3, 2, 4)).unbind(2)
        weights.append(torch.einsum("bihd,bjhd->bhij", q / 2, k).softmax(-1))
    want = (weights[1] - weights[0]).abs().sum(-1)
    for (sample, head, query), response in found.items():
        assert response == pytest.approx(want[sample, head, query].item(), rel=1e-5)
    assert len(found) == want.numel()


def test_attention_that_the_noise_does_not_reach_is_named_and_left_out():
    model = Pair()
    pixels = torch.randn(5, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = semdiag.mask_stability(model, {"pixels": pixels, "ids": texts()}, plan=PLAN)
    alone = of_others(Texts(), texts())
    assert set(found.masks["layer"]) == {1}
    assert found.masks["response"].tolist() == alone["response"].tolist()
    (said,) = found.remarks["text"]
    assert said == (
        "mask stability of pictures not available, because noise after the embedding changes no query or key "
        "there beyond rounding"
    )


def test_noise_that_reaches_no_attention_is_refused():
    class Late(Pair):
        def forward(self, pixels, ids):
            return self.pictures(pixels).mean(1) + self.embedded(ids).mean(1)

    batch = {"pixels": torch.randn(5, 6, 8, dtype=torch.float64), "ids": texts()}
    with pytest.raises(InputError, match="because noise after its embedding changes no queries or keys"):
        semdiag.mask_stability(Late(), batch, plan=PLAN)


def test_an_embedding_of_other_things_than_tokens_takes_no_noise():
    class Floats(Texts):
        def forward(self, x):
            return self.tower(x + self.positions(torch.arange(LENGTH)))

    with pytest.raises(InputError, match="because none of its embeddings looks up the input tokens"):
        semdiag.mask_stability(Floats(), torch.randn(5, LENGTH, 8, dtype=torch.float64), plan=PLAN)


def test_an_encoder_and_a_decoder_each_have_noise_whatever_the_batch():
    batch = {"input_ids": texts(), "decoder_input_ids": texts(seed=4)}
    found = of_others(Decoder(), batch)
    assert (found.groupby("layer")["response"].min() > 0).tolist() == [True, True]
    again = of_others(Decoder(), batch, batch_size=6)  # two samples at a time
    assert again[[*PLACE, "agreement"]].values.tolist() == found[[*PLACE, "agreement"]].values.tolist()
    np.testing.assert_allclose(again["response"], found["response"], rtol=1e-5)


def test_a_shared_table_that_is_never_called_itself_is_found():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": LENGTH}
    model = transformers.T5Model(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    found = of_others(model, {"input_ids": texts(), "decoder_input_ids": texts(seed=4)})
    assert sorted(set(found["layer"])) == [0, 1, 2]  # encoder, decoder, and from the one to the other
    assert (found.groupby("layer")["response"].max() > 0).all()


class Drawn(Texts):
    """Forgets some of its tokens, others in every sample of every forward."""

    def forward(self, ids):
        return self.tower(self.embedded(ids) * (torch.rand(*ids.shape, 1) < 0.8))


def test_what_draws_random_numbers_has_no_noisy_copies():
    """What the draws change was counted as changed by the noise; a forward alone tells it, with a remark."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for probe in (of_others, lambda model, batch: measure_secants(unnamed(model), [batch])):
            with pytest.raises(
                NotAvailableError, match=r"^its forward pass draws random numbers in evaluation mode"
            ):
                probe(Drawn(), texts())
        remarks = [semdiag.measure(model, texts(), k=(2,)).remarks["text"] for model in (Drawn(), Texts())]
    assert [text.str.startswith("its forward pass draws random numbers").sum() for text in remarks] == [1, 0]


OPERATIONS = {
    "ReLU": lambda z: z.relu(),
    "clamp": lambda z: z.clamp(-1, 1),
    "absolute value": lambda z: z.abs(),
    "square": lambda z: z.square(),
    "sorted": lambda z: z.sort(-1).values,
}


class Bent(nn.Module):
    """Does something to its scores that is not followed: they stand in the bias, and queries and keys are 0."""

    def __init__(self, operation):
        super().__init__()
        torch.manual_seed(0)
        self.operation, self.tokens, self.mix = operation, nn.Embedding(20, 8), nn.Linear(8, 24)

    def forward(self, ids):
        q, k, v = self.mix(self.tokens(ids)).chunk(3, -1)
        return self.operation(q @ k.mT / 8**0.5).softmax(-1) @ v


@pytest.mark.parametrize("name", OPERATIONS)
def test_of_scores_that_are_numbers_alone_the_true_reason_is_given(name):
    """It was "noise moves no queries or keys", where it moves every score."""
    with pytest.raises(InputError, match="its scores are known only as numbers"):
        semdiag.mask_stability(Bent(OPERATIONS[name]).double().eval(), torch.randint(20, (4, 6)), plan=PLAN)
