"""Two models run on the same inputs: identical ones, changed weights, quantised copies; what is refused."""

import copy
from dataclasses import replace

import pandas as pd
import pytest
import torch

import semdiag
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.loading import load
from semdiag.measuring.calls.running import unnamed
from semdiag.questions import registry
from semdiag.questions.compare.answer import comparison_claims
from semdiag.questions.compare.measure import (
    SUMS,
    CallPairs,
    ComparePlan,
    comparison_tables,
    head_changes,
    own_copy,
)
from semdiag_files import InputError, files
from semdiag_models import Encoder

CHANGES = ("total_variation", "largest", "moved", "by_weights", "by_values", "change")
OF_OUTPUTS = ("changed", "divergence", "output_change")
L, W, VOCABULARY = 11, 8, 1000


class Causal(torch.nn.Module):
    """A language model written by hand: two blocks of causal attention, 4 heads on 2 key heads, scores by sdpa."""

    def __init__(self, seed=0, blocks=2, heads=4, width=W):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tokens = torch.nn.Embedding(VOCABULARY, width)
            self.q = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
            self.k = torch.nn.ModuleList(torch.nn.Linear(width, width // 2) for _ in range(blocks))
            self.v = torch.nn.ModuleList(torch.nn.Linear(width, width // 2) for _ in range(blocks))
            self.head = torch.nn.Linear(width, VOCABULARY)
        self.heads = heads
        with torch.no_grad():
            for part in (*self.q, *self.k):
                part.weight *= 4

    def forward(self, ids):
        x = self.tokens(ids)
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            parts = (
                part(x).unflatten(2, (heads, -1)).transpose(1, 2)
                for part, heads in ((q, self.heads), (k, self.heads // 2), (v, self.heads // 2))
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            x = x + mixed.transpose(1, 2).flatten(2)
        return self.head(x)


class Wrapped(torch.nn.Module):
    """A model that is a part of another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids).tanh()


def named(module, path):
    return replace(unnamed(module.eval()), path=path)


def ids(samples=5, seed=0):
    return torch.randint(VOCABULARY, (samples, L), generator=torch.Generator().manual_seed(seed))


def both(base, other, inputs, **options):
    """The two tables, of inputs in batches of two."""
    found = comparison_tables(named(base, "a"), named(other, "b"), inputs.split(2), **options)
    return found["compared"], found["compared_outputs"]


@pytest.mark.parametrize("kind", ["full", "topk", "banded", "causal"])
def test_identical_models_give_exact_zeros(kind, wild_encoder, padded_tokens):
    model = Causal() if kind == "causal" else wild_encoder(kind)
    compared, outputs = both(model, copy.deepcopy(model), ids() if kind == "causal" else padded_tokens[0], top=2)
    assert len(compared)
    assert (compared[list(CHANGES)] == 0).all(axis=None)
    assert (compared["overlap"] == compared["top_queries"]).all()
    assert (compared["dispersion"] == compared["dispersion_base"]).all()
    assert (outputs[list(OF_OUTPUTS)] == 0).all(axis=None)
    assert (outputs["loss"] == outputs["loss_base"]).all()
    assert outputs["predictions"].sum() == (5 * L if kind == "causal" else 7)


@pytest.mark.parametrize("kind", ["full", "topk"])
def test_the_tables_are_those_of_the_two_models_calls(kind, wild_encoder, padded_tokens):
    base, other, tokens = wild_encoder(kind), wild_encoder(kind, seed=4), padded_tokens[0]
    calls = []
    for model in (base, other):
        kept = []
        with torch.no_grad(), watch_attention(model, lambda call, kept=kept: kept.append(own_copy(call))):
            model(tokens)
        calls.append(kept)
    compared, _ = both(base, other, tokens, top=3)
    compared = compared.set_index(["sample", "layer", "head"])
    looked_at = 0
    for one, two in zip(*calls, strict=True):
        real = (
            replace(one, queries=tokens != base.config.pad_id),
            replace(two, queries=tokens != base.config.pad_id),
        )
        found = head_changes(*real, 3)
        for sample, head in torch.cartesian_prod(*map(torch.arange, found["queries"].shape)).tolist():
            row, looked_at = compared.loc[sample, one.layer, head], looked_at + 1
            for name in SUMS[:-1]:
                # Other batches are other rows of the same products: rounding, of sums of 12 queries.
                assert row[name] == pytest.approx(found[name][sample, head].item(), rel=1e-9, abs=1e-9), name
    assert looked_at == len(compared)


def test_outputs_are_compared_by_their_distributions_and_losses():
    base, other, inputs = Causal(), Causal(seed=1), ids()
    _, outputs = both(base, other, inputs)
    with torch.no_grad():
        p, q = (model(inputs).double().log_softmax(-1) for model in (base, other))
    assert outputs["sample"].tolist() == list(range(5))
    assert (outputs["predictions"] == L).all()
    assert (outputs["targets"] == L - 1).all()
    for sample, row in outputs.iterrows():
        # float32 logits below 10, whose rounding (1e-6) their differences and so the sums over positions carry on.
        divergence = sum(float(p[sample, i].exp() @ (p[sample, i] - q[sample, i])) for i in range(L))
        assert row["divergence"] == pytest.approx(divergence, abs=L * 1e-5)
        for name, likely in (("loss_base", p), ("loss", q)):
            loss = -sum(likely[sample, i, inputs[sample, i + 1]].item() for i in range(L - 1))
            assert row[name] == pytest.approx(loss, abs=L * 1e-5)
        changed = (p[sample].argmax(-1) != q[sample].argmax(-1)).sum().item()
        assert row["changed"] == changed > 0


@pytest.mark.slow
def test_what_changes_only_the_values_changes_no_weight_of_its_layer_and_the_other_way_round():
    base = Causal()
    values, keys = copy.deepcopy(base), copy.deepcopy(base)
    with torch.no_grad():
        values.v[0].weight *= 1.5
        keys.k[0].weight *= 1.5
    first = {name: both(base, model, ids())[0].query("layer == 0") for name, model in (("v", values), ("k", keys))}
    assert (first["v"][["total_variation", "moved", "by_weights"]] == 0).all(axis=None)
    assert (first["v"]["by_values"] > 0).all()
    assert (first["k"]["by_values"] == 0).all()
    assert (first["k"][["total_variation", "moved", "by_weights"]] > 0).all(axis=None)
    assert first["k"]["change"].tolist() == pytest.approx(first["k"]["by_weights"].tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("pruned", "said"),
    [
        (("v", 1, slice(0, 2)), "begins in layer 1, heads 0, 1."),
        (("q", 1, slice(4, 6)), "begins in layer 1, head 2."),
        (("q", 0, slice(4, 6)), "begins in layer 0, head 2."),
        (("v", 0, slice(2, 4)), "begins in layer 0, heads 2, 3."),
        (("q", 0, slice(0, 8)), None),  # every head of the first layer: nothing precedes
    ],
)
def test_a_pruned_head_is_named_before_what_follows_from_it(pruned, said):
    base = Causal(blocks=3)
    other, (part, block, rows) = copy.deepcopy(base), pruned
    with torch.no_grad():
        getattr(other, part)[block].weight[rows] = 0
        getattr(other, part)[block].bias[rows] = 0
    found = semdiag.compare(base, other, [ids()])
    (result,) = registry.QUESTIONS["compare"].json(semdiag.Findings(found))["results"]
    first = comparison_claims(result["model"], result)[0]
    assert (first.id == "beginning") == (said is not None)
    assert (said or "") in first.sentence
    assert len(first.sentence) < 80  # it is the title of the page


def rounded(model, bits):
    """A copy with matrices rounded to nearest: a row in steps of its largest number / (2^(bits - 1) - 1)."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for weight in found.parameters():
            if weight.ndim == 2:
                step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                weight.copy_((weight / step).round() * step)
    return found


@pytest.mark.slow
def test_copies_of_8_and_of_4_bits_are_that_far_apart(tiny_models):
    """Steps of 4 bits are 127 / 7 = 18 times as long; half of that is left for what is not linear."""
    base = tiny_models[0].module.double()
    inputs = tiny_models[0].default_inputs(20, 0)[0]
    found = {bits: both(base, rounded(base, bits), inputs)[0] for bits in (8, 4)}
    for name, power in (("total_variation", 1), ("moved", 1), ("by_weights", 2), ("by_values", 2)):
        fine, coarse = found[8][name].sum(), found[4][name].sum()
        assert 0 < 9**power * fine < coarse, name
    assert (found[8]["overlap"].sum()) > found[4]["overlap"].sum()
    assert found[8]["dispersion_base"].tolist() == found[4]["dispersion_base"].tolist()


def test_a_model_that_holds_the_base_is_compared_with_it():
    base = Causal()
    compared, outputs = both(base, Wrapped(base), ids())
    assert (compared[list(CHANGES)] == 0).all(axis=None)
    assert (outputs["output_change"] > 0).all()
    assert not any(part._forward_hooks for part in base.modules())


class Drawing(Causal):
    """Draws random numbers in its forward."""

    def forward(self, ids):
        return super().forward(torch.where(torch.rand(ids.shape) < 0.5, ids, 0))


def test_where_a_forward_draws_random_numbers_both_draw_the_same():
    with torch.random.fork_rng():
        compared, outputs = both(Drawing(), Drawing(), ids())
    assert (compared[list(CHANGES)] == 0).all(axis=None)
    assert (outputs[list(OF_OUTPUTS)] == 0).all(axis=None)


def test_half_precision_of_one_of_them_alone():
    base = named(Causal(), "a")
    other = replace(base, path="b", module=copy.deepcopy(base.module))
    found = comparison_tables(base, other, [ids()], dtypes=(torch.float32, torch.bfloat16))
    compared, outputs = found["compared"], found["compared_outputs"]
    changes = compared["total_variation"] / compared["queries"]
    # bfloat16 rounds by 2^-9: scores of some tens to a few tenths. Weights change, and by far less than all.
    assert 0 < changes.max() < 0.25
    assert (outputs["divergence"] > 0).all()


def test_masks_are_kept_once_for_all_layers_and_never_as_often_as_samples():
    q = torch.randn(3, 2, 5, 4)
    mask = torch.rand(5, 5) > 0.5
    pairs = CallPairs("a", "b", 2)
    call = AttentionCall("m", 0, q, q, q, 1.0, mask.expand(3, 1, 5, 5), None, None, q)
    with pairs.of("base"):
        for _ in range(4):
            pairs.keep(call)
    first, second = pairs._kept[:2]
    assert first.allowed is second.allowed
    assert first.allowed.shape == (1, 1, 5, 5)
    assert first.q.data_ptr() != second.q.data_ptr() != q.data_ptr()
    assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in (first.q, first.mixed))


def test_a_batch_that_memory_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr(files, "_memory", lambda: 1000)
    with pytest.raises(
        InputError, match=r"^To keep a batch of the attention of the base \(see --batch-size\) would"
    ):
        both(Causal(), Causal(), ids())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Causal(heads=2), "in layer 0 they have 4 heads and 2, 2 numbers in a value and 4."),
        (Causal(blocks=3), "their attention is called 2 and 3 times in a forward."),
        (Causal(blocks=1), "their attention is called 2 and 1 times in a forward."),
        (Causal(width=16), "in layer 0 they have 2 numbers in a value and 4."),
    ],
)  # fmt: skip
def test_other_architectures_are_refused(other, said):
    with pytest.raises(InputError) as refused:
        both(Causal(), other, ids())
    assert str(refused.value) == f"a and b cannot be compared: {said}"


@pytest.mark.parametrize("which", [0, 1])
def test_scores_that_are_no_numbers_are_refused(which):
    models = [Causal(), Causal(seed=1)]
    with torch.no_grad():
        models[which].q[1].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="in layer 1 a score or a value is not a finite number"):
        both(*models, ids())


class Answering(Causal):
    """Returns something else made of its logits."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, ids):
        return self.answer(super().forward(ids))


@pytest.mark.parametrize(
    ("base", "other", "code", "said"),
    [
        (None, lambda x: x[:, :, :7], "outputs-not-compared",
         f"outputs are not compared: they are of the shapes (2, {L}, {VOCABULARY}) and (2, {L}, 7)"),
        (None, lambda x: x[:, :, 0], "outputs-not-compared",
         f"outputs are not compared: they are of the shapes (2, {L}, {VOCABULARY}) and (2, {L})"),
        (None, lambda x: "text", "outputs-not-compared",
         "outputs are not compared: its output, a str, holds no tensor of floating-point numbers"),
        (lambda x: "text", None, "outputs-not-compared",
         "outputs are not compared: its output, a str, holds no tensor of floating-point numbers"),
        (lambda x: (x[..., :5], x), lambda x: (x[..., :5], x), "outputs-compared",
         "of its outputs number 1 alone is compared, not number 2"),
        (lambda x: {"logits": x[:, 0, :1]}, lambda x: {"logits": x[:, 0, :1]}, "logits-as-outputs",
         "logits are compared as outputs, not as a distribution: there is one alone, of which a softmax is always "
         "1"),
    ],
)  # fmt: skip
def test_how_outputs_are_compared_is_a_remark(base, other, code, said):
    models = [Causal() if answer is None else Answering(answer) for answer in (base, other)]
    remarks = []
    compared, outputs = both(*models, ids(), remark=lambda text, code: remarks.append((code, text)))
    assert (compared["change"] == 0).all()
    assert remarks == [(code, said)]
    assert len(outputs) == (0 if code == "outputs-not-compared" else 5)


def test_the_plan_refuses_a_top_of_none():
    with pytest.raises(InputError, match=r"--top must be at least 1\. Got 0"):
        ComparePlan(0)


def test_an_encoder_that_does_not_take_the_inputs_is_named(tiny_config, tiny_runs):
    short = Encoder(tiny_config(length=6))
    with pytest.raises(InputError, match=r"^b: The model takes inputs of length 1 to 6. Got length 12\.$"):
        both(load(tiny_runs.full).module, short, torch.zeros(2, 12, dtype=torch.int64))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_in_python_the_same(kind, wild_encoder, padded_tokens):
    models = (
        (Causal(), Causal(seed=1)) if kind == "causal" else (wild_encoder("full"), wild_encoder("full", seed=4))
    )
    inputs = ids() if kind == "causal" else padded_tokens[0]
    found = semdiag.compare(*models, inputs, top=3, batch_size=2)
    compared, outputs = both(*models, inputs, top=3)
    assert found.models["model"].tolist() == ["model"]
    for table, own in ((found.compared, compared), (found.compared_outputs, outputs)):
        names = {"model": "model", "base": "base"}
        pd.testing.assert_frame_equal(table, own.assign(**names))
    assert semdiag.plot(found, "compare_map").axes
    with pytest.raises(InputError, match="--top must be at least 1"):
        semdiag.compare(*models, inputs, top=0)


@pytest.mark.parametrize("which", [0, 1])
def test_a_model_that_fails_on_the_inputs_is_refused_by_name(which):
    models = [Causal(), Causal()]
    models[which].head = torch.nn.Linear(3, 7)
    with pytest.raises(InputError, match=f"^{'ab'[which]} cannot be run on these inputs"):
        both(*models, ids())
