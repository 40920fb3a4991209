"""Measuring and capturing models of others: what is measured is what a loop over their scores gives."""

import itertools
import math
import re
import warnings
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.bounds.measure import CONSTANTS, BoundsPlan
from semdiag.questions.stability.gains import spaced
from semdiag.questions.stability.measure import SECANTS, SecantsPlan, measure_secants
from semdiag_files import InputError
from semdiag_models import Encoder, ModelConfig

LENGTH, HEADS, WIDTH, BLOCKS = 9, 2, 8, 2


class Block(nn.Module):
    """Causal attention by hand; remembers its queries and keys for the tests."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.seen = []

    def forward(self, x, attention_mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        allowed = causal & attention_mask.bool()[:, None, None, :] if attention_mask is not None else causal
        self.seen.append((q.detach(), k.detach(), allowed.expand(len(x), HEADS, -1, -1)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))


class Decoder(nn.Module):
    """Two blocks."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids, attention_mask=None):
        x = 3 * self.tokens(ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return x


@pytest.fixture
def decoder():
    """A random one, in training mode but for one part."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Decoder()
    model.blocks[1].drop.eval()
    return model


@pytest.fixture
def batch():
    """Five padded samples."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (5, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([9, 4, 1, 9, 7])[:, None]
    return {"ids": ids, "attention_mask": mask.long()}


def naive(model, mask, ks):
    """Rows {(sample, layer, head, query): columns} from the queries and keys that the blocks saw."""
    rows, loads = {}, {}
    for layer, block in enumerate(model.blocks):
        q, k, allowed = (torch.cat(parts) for parts in zip(*block.seen, strict=True))
        for sample in range(len(q)):
            for head in range(HEADS):
                for i in range(LENGTH):
                    if not mask[sample, i]:
                        continue
                    z = {
                        j: float(q[sample, head, i] @ k[sample, head, j]) / math.sqrt(WIDTH / HEADS)
                        for j in range(LENGTH)
                        if allowed[sample, head, i, j]
                    }
                    falling = sorted(z.values(), reverse=True)
                    row = {"keys": len(z), "dispersion": falling[0] - falling[-1]}
                    for n in ks:
                        row[f"dispersion_k{n}"] = falling[0] - falling[:n][-1]
                        row[f"separation_k{n}"] = falling[n - 1] - falling[n] if len(z) > n else math.inf
                        row[f"weight_kept_k{n}"] = sum(map(math.exp, falling[:n])) / sum(map(math.exp, falling))
                        for j in sorted(z, key=lambda j: -z[j])[:n]:
                            place = (sample, layer, head, j, n)
                            loads[place] = loads.get(place, 0) + 1
                    rows[sample, layer, head, i] = row
    return rows, loads


def test_the_numbers_are_those_of_a_loop_over_the_scores(decoder, batch):
    ks = (1, 3)
    # In float64: in float32 another order of the products could exchange two keys.
    found = semdiag.measure(decoder.double(), batch, k=ks, batch_size=2, dtype=None)
    rows, loads = naive(decoder, batch["attention_mask"], ks)
    table = found.queries.set_index(["sample", "layer", "head", "query"]).sort_index()
    wanted = pd.DataFrame.from_dict(rows, orient="index").sort_index()
    assert list(table.index) == list(wanted.index)
    np.testing.assert_allclose(
        table[wanted.columns].to_numpy(float), wanted.to_numpy(float), rtol=1e-11, atol=1e-11
    )
    for row in found.loads.to_dict("records"):
        for n in ks:
            assert row[f"load_k{n}"] == loads.get((*(row[c] for c in ("sample", "layer", "head", "key")), n), 0)
    assert found.loads.groupby("sample")["key"].max().tolist() == [8, 3, 0, 8, 6]


def test_what_is_known_of_the_model_is_said_and_nothing_else(decoder, batch):
    row = semdiag.measure(decoder, batch, k=(2,)).models.iloc[0]
    assert (row["attention"], row["blocks"], row["heads"], row["length"]) == ("causal", BLOCKS, HEADS, LENGTH)
    assert (row["samples"], row["attention_found"], row["attention_captured"]) == (5, 2, 2)
    assert row[["k", "seed", "epoch", "width", "task", "accuracy"]].isna().all()
    assert row["residual"] < 1e-6
    assert row["parameters"] == sum(p.numel() for p in decoder.parameters())


def test_the_model_is_as_before(decoder, batch):
    state = {name: value.clone() for name, value in decoder.state_dict().items()}
    modes = [part.training for part in decoder.modules()]
    random = torch.get_rng_state()
    semdiag.measure(decoder, batch)
    with pytest.raises(InputError):
        semdiag.measure(decoder, {"ids": batch["ids"] + 100})
    assert [part.training for part in decoder.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in decoder.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in decoder.parameters())


def test_a_model_that_is_in_place_is_not_copied(decoder, batch, monkeypatch):
    monkeypatch.setattr(Decoder, "__deepcopy__", lambda *_: pytest.fail("copied"), raising=False)
    semdiag.measure(decoder, batch)
    semdiag.measure(decoder, batch, device="cpu", dtype=torch.float32)


def test_in_float64_a_copy_is_measured(decoder, batch):
    single, double = (semdiag.measure(decoder, batch, dtype=t) for t in (torch.float32, torch.float64))
    assert double.queries["dispersion"].dtype == np.float64
    assert next(decoder.parameters()).dtype == torch.float32
    np.testing.assert_allclose(single.queries["dispersion"], double.queries["dispersion"], rtol=1e-4, atol=1e-5)


def offload(model):
    """Keep every weight elsewhere until its module runs, as accelerate's hooks do."""
    for module in model.modules():
        kept = dict(module._parameters)

        def put(module, *_, weights):
            module._parameters.update(weights)

        away = {name: nn.Parameter(p.detach().to("meta")) for name, p in kept.items()}
        put(module, weights=away)
        module.register_forward_pre_hook(partial(put, weights=kept))
        module.register_forward_hook(partial(put, weights=away))


@pytest.mark.slow
def test_a_model_whose_weights_are_offloaded_is_measured_where_it_runs(decoder, batch):
    """Its inputs went to the device "meta", and the model was said not to run on them."""
    before, sweep = semdiag.measure(decoder, batch, k=(3,)), semdiag.k_sweep(decoder, batch)
    offload(decoder)
    pd.testing.assert_frame_equal(semdiag.measure(decoder, batch, k=(3,)).queries, before.queries)
    pd.testing.assert_frame_equal(semdiag.k_sweep(decoder, batch).sweep, sweep.sweep)
    with pytest.raises(InputError, match=r"its weights are offloaded \(meta tensors\)"):
        semdiag.measure(decoder, batch, dtype=torch.float64)


def test_padding_may_be_given_where_the_model_takes_none(decoder, batch):
    real = batch["attention_mask"].bool()
    found = semdiag.measure(decoder, batch["ids"], real=real, batch_size=2)
    assert found.queries.groupby("sample").size().tolist() == (real.sum(1) * BLOCKS * HEADS).tolist()
    assert len(semdiag.measure(decoder, batch["ids"]).queries) == real.numel() * BLOCKS * HEADS


def test_a_shared_module_is_one_layer_per_call(batch):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.block = nn.Embedding(11, WIDTH), Block()

        def forward(self, ids):
            return self.block(self.block(self.tokens(ids), None), None)

    found = semdiag.measure(Shared(), batch["ids"])
    assert found.calls[["layer", "module", "occurrence"]].values.tolist() == [[0, "block", 0], [1, "block", 1]]
    assert found.models["attention_captured"].item() == 1
    assert found.queries["layer"].unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"ids": torch.full((2, 3), 99)}, r"^model cannot be run on these inputs \(IndexError: "),
        ({"wrong": torch.zeros(2, 3)}, r"^model cannot be run on these inputs \(TypeError: .*'wrong'"),
        ([], "^There are no inputs to measure on"),
        ({"ids": torch.zeros(1, 3, dtype=torch.int64), "attention_mask": torch.zeros(1, 3)}, "^There is no query"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(decoder, inputs, message):
    with pytest.raises(InputError, match=message) as refused:
        semdiag.measure(decoder, inputs)
    assert "\n" not in str(refused.value)


def test_a_model_without_attention_is_refused():
    with pytest.raises(InputError, match=r"^No softmax attention was seen while model ran\."):
        semdiag.measure(nn.Linear(3, 3), torch.zeros(2, 3))


def test_a_k_beyond_the_keys_is_refused(decoder, batch):
    with pytest.raises(InputError, match=r"^k must lie in 1 … 9, the largest number of keys\. Got k=10\.$"):
        semdiag.measure(decoder, batch, k=(10,))
    assert not [name for name in semdiag.measure(decoder, batch, k=(2, 10)).queries if name.endswith("_k10")]
    with pytest.raises(InputError, match=r"^k must be at least 1\. Got k=0\.$"):
        semdiag.measure(decoder, batch, k=(0, 2))


def test_a_capture_gives_what_a_measurement_gives(decoder, batch):
    decoder.eval().double()
    with semdiag.capture(decoder, k=3) as calls:
        decoder(**batch)
        decoder(batch["ids"][:2], batch["attention_mask"][:2])
    found = semdiag.measure(decoder, batch, k=(3,), dtype=torch.float64).queries
    table = calls.dispersion(k=3)
    first = table[table["call"] < BLOCKS]
    place = ["sample", "layer", "head", "query"]
    merged = first.merge(found, on=place)
    assert len(merged) == len(first) == len(found)
    np.testing.assert_allclose(merged["dispersion_x"], merged["dispersion_k3"], rtol=1e-10, atol=1e-12)
    assert table["call"].unique().tolist() == [0, 1, 2, 3]
    assert calls.residual["calls"].tolist() == [2, 2]
    assert calls.audit.empty
    both = calls.separation(k=[1, 3])
    assert both["k"].unique().tolist() == [1, 3]
    assert len(both) == 2 * len(table)
    loads = calls.loads(k=3)
    kept = calls.dispersion()["keys"].clip(upper=3).sum()
    assert loads["load"].sum() == kept
    assert calls.dispersion()["k"].isna().all()


def test_a_capture_refuses_a_k_beyond_its_own(decoder, batch):
    with semdiag.capture(decoder, k=2) as calls:
        decoder(**batch)
    with pytest.raises(
        ValueError, match=r"^k must lie in 1 … 2, the capture's k\. Got 3: use capture\(model, k=3\)"
    ):
        calls.dispersion(k=[1, 3])
    with pytest.raises(ValueError, match="k must be at least 0"), semdiag.capture(decoder, k=-1):
        pass


def test_a_capture_in_training_changes_neither_gradients_nor_hooks(decoder, batch):
    def gradients():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            decoder.zero_grad()
            decoder(**batch).square().sum().backward()
        return [p.grad.clone() for p in decoder.parameters()]

    plain = gradients()
    with semdiag.capture(decoder, k=2) as calls:
        watched = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert len(calls) == BLOCKS
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())


def test_an_empty_capture_has_empty_tables(decoder):
    with semdiag.capture(decoder) as calls:
        pass
    assert calls.dispersion(k=[2]).empty
    assert calls.loads().empty
    assert calls.residual.empty


def test_secants_lie_below_the_sound_constants_and_follow_the_seed(decoder, batch):
    rows = measure_secants(unnamed(decoder), [batch], levels=(0.01, 0.5), samples=4)
    assert len(rows) == 2 * (9 + 4 + 1 + 9) * BLOCKS * HEADS
    assert (rows["weight_change"] <= 0.5 * rows["score_change"] * (1 + 1e-12)).all()
    assert rows["weight_change"].max() > 1e-3
    again = measure_secants(unnamed(decoder), [batch], levels=(0.01, 0.5), samples=4)
    pd.testing.assert_frame_equal(rows, again)
    other = measure_secants(unnamed(decoder), [batch], levels=(0.01, 0.5), samples=4, seed=1)
    assert not rows["weight_change"].equals(other["weight_change"])
    assert not any(m._forward_hooks for m in decoder.modules())


def test_of_long_samples_spaced_queries_are_compared_and_that_is_said(decoder, batch, monkeypatch):
    whole, said = measure_secants(unnamed(decoder), [batch]), []
    monkeypatch.setattr("semdiag.questions.stability.measure.QUERIES", 4)
    monkeypatch.setattr("semdiag.questions.stability.measure.spaced", lambda length: spaced(length, 4))
    monkeypatch.setattr("semdiag.questions.stability.measure._PAIRS", 1)
    rows = measure_secants(unnamed(decoder), [batch], remark=lambda text, code: said.append((text, code)))
    length = next(iter(batch.values())).shape[1]
    queries = range(length - 1, -1, -math.ceil(length / 4))
    expected = whole[whole["query"].isin(queries) & (whole["sample"] < 4)].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, expected)
    assert said == [("noise: 4 samples, and at most 4 evenly spaced queries of each", "noise-thinned")]


def test_clean_rows_of_the_secants_are_those_of_the_measurement(decoder, batch):
    rows = measure_secants(unnamed(decoder), [batch], levels=(1e-12,))
    found = semdiag.measure(decoder, batch, dtype=torch.float64).queries
    merged = rows.merge(found, on=["sample", "layer", "head", "query"])
    assert len(merged) == len(found)
    np.testing.assert_allclose(merged["dispersion_x"], merged["dispersion_y"], atol=1e-8)


def test_a_sweep_asks_what_a_measurement_asks(decoder, batch):
    sweep = semdiag.k_sweep(decoder, batch, batch_size=2, dtype=torch.float64).sweep
    found = semdiag.measure(decoder, batch, k=(3,), dtype=torch.float64).queries
    for layer in (-1, 0):
        rows = found if layer == -1 else found[(found["layer"] == layer) & (found["head"] == 0)]
        own = sweep[(sweep["layer"] == layer) & (sweep["head"] == min(layer, 0)) & (sweep["k"] == 3)]
        own = own.set_index("quantity")["p50"]
        assert own["dispersion"] == pytest.approx(rows["dispersion_k3"].median(), rel=1e-5)
        assert own["weight_kept"] == pytest.approx(rows[rows["keys"] > 3]["weight_kept_k3"].median(), rel=1e-5)


@pytest.mark.slow
def test_masks_of_padded_batches_survive_no_noise_and_certified_ones_any(decoder, batch):
    batches = [{name: value[:2, :9] for name, value in batch.items()}, {n: v[4:, :7] for n, v in batch.items()}]
    plan = semdiag.NoisePlan((1e-12, 0.02, 3.0), draws=4, k=2)
    found = semdiag.mask_stability(decoder, batches, plan=plan, dtype=torch.float64)
    masks, effects = found.masks, found.noise_effects
    by_level = masks.groupby("level")
    dropping = sum(max(0, n - 2) for n in (9, 4, 7)) * BLOCKS * HEADS  # the first two queries see two keys at most
    assert by_level.size().tolist() == [dropping] * 3
    untied = masks[(masks["level"] == 1e-12) & (masks["separation"] > 1e-6)]  # equal tokens have equal keys
    assert len(untied) > dropping / 2
    assert (untied["exact"] == 1).all()
    assert by_level["exact"].mean().iloc[2] < 0.9
    assert by_level["certified"].mean().iloc[1] > 0.0
    assert masks["certified_changed"].sum() == 0
    assert effects.empty
    again = semdiag.mask_stability(decoder, batches, plan=plan, dtype=torch.float64).masks
    pd.testing.assert_frame_equal(masks, again)


def test_without_an_embedding_the_report_says_what_is_missing_and_why():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    model = semdiag.LoadedModel("own:model", "", layer, "factory", "unknown", batches=[torch.randn(2, 5, 8)])
    found = survey([model], Conditions(k=(2,), plans=(SecantsPlan(), BoundsPlan())))
    said = found.remarks["text"].tolist()
    assert any(text.startswith("secants not available, because it has no token embedding") for text in said)
    assert any(text.startswith("bounds not available, because its normalisations") for text in said)
    assert found[SECANTS].empty
    assert found[CONSTANTS].empty


@pytest.mark.slow
def test_secants_of_attention_that_the_noise_does_not_reach_are_named_and_left_out(decoder, batch):
    class Two(nn.Module):
        """A tower for pictures before the one for texts."""

        def __init__(self):
            super().__init__()
            self.pictures, self.texts = Block(), decoder

        def forward(self, pixels, ids, attention_mask):
            return self.pictures(pixels, None).mean(1) + self.texts(ids, attention_mask).mean(1)

    pixels = torch.randn(5, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    model = semdiag.LoadedModel("own:two", "", Two(), "factory", "unknown", batches=[{"pixels": pixels, **batch}])
    found = survey([model], Conditions(plans=(SecantsPlan(),), device="cpu"))
    alone = measure_secants(unnamed(decoder), [batch])
    assert set(found.queries["layer"]) == {0, 1, 2}
    assert (found.secants["layer"] - 1).tolist() == alone["layer"].tolist()
    np.testing.assert_allclose(found.secants["weight_change"], alone["weight_change"], rtol=1e-9, atol=1e-15)
    said = [text for text in found.remarks["text"] if "secants" in text]
    assert said == [
        "secants of pictures not available, because noise after the embedding changes no query or key there "
        "beyond rounding"
    ]


def test_commands_for_our_encoders_refuse_others_before_anything_runs(decoder):
    model = semdiag.LoadedModel("own:model", "", decoder, "factory", "unknown")
    with pytest.raises(InputError, match=r"^own:model is a Decoder: this needs one of semdiag's encoders"):
        survey([model], Conditions(encoders_only=True))
    with pytest.raises(InputError, match=r"^Name inputs for own:model .* token ids .* from the function\.$"):
        survey([model], Conditions())


class Stream:
    """Batches of token ids without end; counts those that were read and remembers which are still held."""

    def __init__(self):
        self.read, self.alive = 0, []

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            batch = torch.randint(11, (4, LENGTH), generator=generator)
            self.read += 1
            self.alive.append(weakref.ref(batch))
            assert sum(known() is not None for known in self.alive) <= 3  # the last, this one, a view
            yield batch


def test_batches_are_read_one_at_a_time_and_no_further_than_asked(decoder):
    stream = Stream()
    found = semdiag.measure(decoder, stream, samples=30)
    assert stream.read == 8
    assert int(found.models["samples"].iloc[0]) == 30
    assert found.queries["sample"].nunique() == 30
    kept = torch.cat(list(itertools.islice(Unheld(), 8)))[:30]
    pd.testing.assert_frame_equal(found.queries, semdiag.measure(decoder, kept, batch_size=4).queries)


class Unheld(Stream):
    """The same, without a word about who holds them."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(11, (4, LENGTH), generator=generator)


def test_a_generator_is_checked_as_it_comes(decoder):
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with pytest.raises(InputError, match="There are no inputs to measure on"):
        semdiag.measure(decoder, iter([]))
    with pytest.raises(InputError, match=r"samples must be at least 1\. Got 0\."):
        semdiag.measure(decoder, ids, samples=0)
    encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=LENGTH, blocks=1)).eval()
    with pytest.raises(InputError, match="Got 3 for 4 samples"):
        semdiag.measure(encoder, iter([ids, ids]), labels=torch.zeros(3))
    with pytest.raises(InputError, match="Token id 7 is out of range"):
        semdiag.measure(encoder, iter([ids, ids + 7]))
    with pytest.raises(InputError, match=r"k must lie in 1 … 9"):
        semdiag.measure(encoder, iter([ids]), k=[10])
    found = semdiag.measure(encoder, iter([ids, ids]), labels=torch.zeros(9), samples=3)
    assert int(found.models["samples"].iloc[0]) == 3


def test_a_survey_takes_the_first_samples_of_inputs_without_an_end(decoder):
    loaded = replace(unnamed(decoder), batches=Unheld())
    found = survey([loaded], Conditions(samples=10, device="cpu"))
    assert int(found.models["samples"].iloc[0]) == 10
    assert found.models["inputs"].iloc[0] == "came with the model, the first 10 samples"


@pytest.mark.slow
def test_a_mixture_of_experts_in_bfloat16_says_why_it_has_no_stability():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        config = transformers.MixtralConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=8, num_local_experts=2,
        )  # fmt: skip
        model = transformers.MixtralModel._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    if getattr(config, "_experts_implementation", None) != "grouped_mm":
        pytest.skip("this transformers has no grouped experts")
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped product: experts are multiplied one by one, in any precision")
    loaded = replace(unnamed(model), batches=[torch.ones(2, 4, dtype=torch.int64)])
    conditions = Conditions(plans=(SecantsPlan((0.01,)),))
    found = survey([loaded], conditions)
    (text,) = found.remarks["text"]
    assert text.startswith(
        "secants not available, because model cannot run in float64, in which it is measured here"
    )
    assert text.endswith(
        "experts are one grouped matrix product, which does not support float64; "
        'model.set_experts_implementation("eager") multiplies them one by one'
    )
    assert len(found.queries)
    model.set_experts_implementation("eager")
    assert len(survey([loaded], conditions).secants)


class Masking(nn.Module):
    """Self- or cross-attention with a rule that forbids scores."""

    def __init__(self, rule):
        super().__init__()
        self.qkv, self.rule = nn.Linear(WIDTH, 3 * WIDTH), rule

    def forward(self, x, memory):
        parts = self.qkv(x)[..., :WIDTH], *self.qkv(memory)[..., WIDTH:].chunk(2, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        z = q @ k.transpose(-2, -1)
        return z.masked_fill(self.rule(z), -math.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (lambda z: torch.zeros_like(z, dtype=torch.bool), "full"),
        (lambda z: (torch.arange(z.shape[-1]) >= torch.tensor([9, 5])[:, None])[:, None, None], "full"),  # padding
        (lambda z: z < z.topk(3).values[..., -1:], "masked"),
        (lambda z: (torch.arange(9) - torch.arange(9)[:, None]) % 9 >= 3, "masked"),
        (lambda z: torch.arange(9) // 3 != torch.arange(9)[:, None] // 3, "masked"),
        (lambda z: torch.ones_like(z, dtype=torch.bool).triu(1), "causal"),
    ],
    ids=["nothing", "padding", "top-3", "ring", "blocks", "causal"],
)
@pytest.mark.parametrize("queries", [None, 4])
def test_full_is_what_forbids_no_key(rule, kind, queries):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, x, memory = Masking(rule), torch.randn(2, 9, WIDTH), torch.randn(2, 9, WIDTH)
    found = semdiag.measure(model, [(x, memory)], queries=queries)
    assert (found.models["attention"].item(), found.calls["mask"].item()) == (kind, kind)


def test_cross_attention_to_every_key_is_full():
    model = Masking(lambda z: torch.zeros_like(z, dtype=torch.bool))
    found = semdiag.measure(model, [(torch.randn(2, 4, WIDTH), torch.randn(2, 9, WIDTH))])
    assert found.models["attention"].item() == "full"


def test_one_k_need_not_stand_in_a_list(decoder, batch):
    one, listed = (semdiag.measure(decoder, batch, k=k) for k in (3, (3,)))
    pd.testing.assert_frame_equal(one.queries, listed.queries)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": ("3",)}, "k must be a whole number. Got '3'."),
        ({"k": (2.5,)}, "k must be a whole number. Got 2.5."),
        ({"queries": 2.5}, "Queries to draw per sample and head must be a whole number. Got 2.5."),
        ({"dtype": "float64"}, "dtype must be torch.float32 or torch.float64. Got 'float64'."),
        ({"dtype": torch.int32}, "dtype must be torch.float32 or torch.float64. Got torch.int32."),
        ({"batch_size": 2.5}, "batch_size must be a whole number. Got 2.5."),
        ({"samples": 2.5}, "samples must be a whole number. Got 2.5."),
        ({"max_queries": 0}, "max_queries must be at least 50. Got 0."),
        ({"min_keys": -3}, "min_keys must be at least 1. Got -3."),
        ({"seed": "a"}, "seed must be a whole number. Got 'a'."),
    ],
)
def test_arguments_that_are_none_are_refused_by_name(decoder, batch, wrong, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        semdiag.measure(decoder, batch, **wrong)


def test_what_is_no_model_no_input_and_no_plan_is_refused(decoder, batch):
    with pytest.raises(InputError, match=r"^A model is a torch\.nn\.Module .* Got int\.$"):
        semdiag.measure(3, batch)
    with pytest.raises(InputError, match=r"Got str\.$"):
        semdiag.measure(decoder, "text")
    with pytest.raises(InputError, match=r"Got list without a tensor\.$"):
        semdiag.measure(decoder, [[[1, 2], [3, 4]]])
    with pytest.raises(InputError, match=r"^A plan is one of .*KSweepPlan.* Got 3\.$"):
        semdiag.k_sweep(decoder, batch, plan=3)


def test_a_capture_asks_for_a_k_of_at_least_1(decoder, batch):
    with semdiag.capture(decoder, k=3) as calls:
        decoder(**batch)
    with pytest.raises(InputError, match=r"^k must be at least 1\. Got 0\.$"):
        calls.dispersion(k=0)
    with pytest.raises(InputError, match=r"^k must be a whole number\. Got 2\.5\.$"):
        calls.separation(k=2.5)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.export's own
@pytest.mark.parametrize("nested", [False, True])
def test_an_exported_graph_is_measured_although_it_has_no_evaluation_mode(nested):
    x = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    model = Plain().eval()
    exported = torch.export.export(model, (x,)).module()
    given = nn.Sequential(exported) if nested else exported
    modes = [part.training for part in given.modules()]
    found, expected = (semdiag.measure(m, [x], k=(2,)).queries for m in (given, model))
    pd.testing.assert_frame_equal(found, expected)
    assert [part.training for part in given.modules()] == modes
