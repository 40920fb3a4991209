"""What a model's output is read as: a distribution over classes or tokens, or a representation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.rules import TopK
from semdiag.capturing.sparsify import sparsify
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.k_sweep.changes import change_table
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.k_sweep.rerun import measure_of, rerun
from semdiag.questions.k_sweep.wording import sparse_verdict

SAMPLES, LENGTH, WORDS = 12, 10, 30


def loaded(module, **more):
    return LoadedModel("own:model", "", module, "factory", "unknown", **more)


def classifier(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=WORDS, **sizes, initializer_range=0.5, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(config).double().eval()


def tokens():
    return torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


FLOATS = torch.rand(SAMPLES, 4, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("options", "labels", "why"),
    [
        ({"num_labels": 1}, None, "there is one alone, of which a softmax is always 1"),
        ({"num_labels": 1}, FLOATS[:, 0], "there is one alone, of which a softmax is always 1"),
        ({"num_labels": 4, "problem_type": "regression"}, None, "the problem type of the model is regression"),
        (
            {"num_labels": 4, "problem_type": "multi_label_classification"},
            FLOATS.round(),
            "the problem type of the model is multi_label_classification",
        ),
    ],
)
def test_logits_whose_softmax_says_nothing_are_compared_as_outputs(options, labels, why):
    """Over one logit the softmax is always 1: whatever was masked, nothing changed."""
    model, ids, said = classifier(**options), tokens(), []
    batch = {"input_ids": ids} if labels is None else {"input_ids": ids, "labels": labels.double()}
    again = rerun(
        loaded(model), [batch], None, [("topk", 1, TopK(1))], remark=lambda text, code: said.append(text)
    )
    assert measure_of(again) == "output_change"
    assert again[["targets", "predictions", "classes"]].sum().sum() == 0
    with torch.no_grad():
        before = model(ids).logits
        with sparsify(model, TopK(1)):
            change = (model(ids).logits - before).norm(dim=1) / before.norm(dim=1)
    rows = again[again["mask"] == "topk"]
    assert rows["output_change"].tolist() == pytest.approx(change.tolist(), rel=1e-9)
    assert change.mean() > 0.1
    assert said == [f"logits are compared as outputs, not as a distribution: {why}"]


def test_labels_that_are_no_classes_are_no_targets():
    """Of a model that does not say what its logits are, floating-point labels do."""

    class Silent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = classifier(num_labels=4)

        def forward(self, input_ids, labels=None):
            return {"logits": self.model(input_ids).logits}

    ids, model, said = tokens(), Silent(), []
    for batch, labels in (({"input_ids": ids, "labels": FLOATS}, None), ({"input_ids": ids}, FLOATS)):
        again = rerun(loaded(model), [batch], labels, [], remark=lambda text, code: said.append(text))
        assert measure_of(again) == "output_change"
    assert len(said) == 2
    assert all(text.endswith("the labels are floating-point numbers, no classes") for text in said)
    classes = rerun(
        loaded(model),
        [{"input_ids": ids, "labels": ids[:, 0] % 4}],
        None,
        [],
        remark=lambda text, code: said.append(text),
    )
    assert (measure_of(classes), len(said)) == ("loss", 2)


def test_maps_of_logits_are_compared_as_outputs():
    """Of (samples, classes, height, width) the last axis is not that of the classes."""

    class Map(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = classifier(num_labels=8)

        def forward(self, input_ids):
            return {"logits": self.model(input_ids).logits.reshape(-1, 2, 2, 2)}

    ids, model, said = tokens(), Map(), []
    again = rerun(
        loaded(model), [ids], ids[:, 0] % 2, [("topk", 1, TopK(1))], remark=lambda text, code: said.append(text)
    )
    assert measure_of(again) == "output_change"
    with torch.no_grad():
        before = model(ids)["logits"].flatten(1)
        with sparsify(model, TopK(1)):
            change = (model(ids)["logits"].flatten(1) - before).norm(dim=1) / before.norm(dim=1)
    assert again[again["mask"] == "topk"]["output_change"].tolist() == pytest.approx(change.tolist(), rel=1e-9)
    why = "they have 4 axes, and nothing tells which is that of the classes"
    assert said == [f"logits are compared as outputs, not as a distribution: {why}"]


def test_one_logit_for_each_token_is_no_distribution_over_tokens():
    """Of a discriminator: real or replaced. Padding counts nowhere."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ElectraConfig(
        vocab_size=WORDS, embedding_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, initializer_range=1.0,
    )  # fmt: skip
    model, said = transformers.ElectraForPreTraining(config).eval().double(), []
    real = torch.ones(len(tokens()), LENGTH, dtype=torch.int64)
    real[1, 2:] = 0
    batch = {"input_ids": tokens(), "attention_mask": real}
    again = rerun(
        loaded(model), [batch], None, [("topk", 1, TopK(1))], remark=lambda text, code: said.append(text)
    )
    why = "there is one for each token, not one for each class"
    assert said == [f"logits are compared as outputs, not as a distribution: {why}"]
    with torch.no_grad():
        before = model(**batch).logits * real
        with sparsify(model, TopK(1)):
            change = (model(**batch).logits * real - before).norm(dim=1) / before.norm(dim=1)
    assert again[again["mask"] == "topk"]["output_change"].tolist() == pytest.approx(change.tolist(), rel=1e-9)
    classes = rerun(loaded(classifier(num_labels=LENGTH)), [batch], None, [])  # as many classes as tokens
    assert measure_of(classes) == "divergence"


def test_pixels_are_no_distribution():
    """What ViTMAE calls logits are the pixels of patches."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    decoder = {f"decoder_{name}": value for name, value in sizes.items()}
    model = transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(image_size=8, patch_size=4, **sizes, **decoder)
    )
    again = rerun(loaded(model.eval()), [{"pixel_values": torch.ones(2, 3, 8, 8)}], None, [])
    assert measure_of(again) == "output_change"


@pytest.mark.slow
def test_a_model_with_one_logit_is_not_said_to_lose_nothing():
    plan = KSweepPlan(LENGTH - 1, rerun=True, ks=(1, LENGTH - 1))
    model = loaded(classifier(num_labels=1), batches=[{"input_ids": tokens()}])
    found = survey([model], Conditions(plans=(plan,), dtype="float64"))
    verdict = sparse_verdict(Findings(found), "own:model")
    assert verdict.measure == "output_change"
    assert f"k = {verdict.k} per query" in verdict.sentence
    assert found.remarks["text"].str.startswith("logits are compared as outputs").sum() == 1


# ------------------------------------------------------------------------------- infinite and missing numbers


class Never(torch.nn.Module):
    """A causal model that gives one token a logit of -inf; ``spoilt`` is another's where a key is dropped."""

    def __init__(self, columns=WORDS, spoilt=None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens, self.places = torch.nn.Embedding(WORDS, 16), torch.nn.Embedding(LENGTH, 16)
            self.qkv, self.head = torch.nn.Linear(16, 48), torch.nn.Linear(16, columns)
        self.spoilt = spoilt

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        q, k, v = (2 * part for part in self.qkv(x)[:, None].chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        said = self.head(x + mixed).index_fill(-1, torch.tensor([0]), -torch.inf)
        if self.spoilt is not None:
            weights = np.exp((q @ k.mT / 4).numpy()) * np.tri(LENGTH)  # which no mask of ours reaches
            whole = torch.from_numpy(weights / weights.sum(-1, keepdims=True) @ v.numpy())[:, 0]
            said[..., 1].masked_fill_((mixed - whole).norm(dim=-1) > 1e-6, self.spoilt)
        return said


def never(**options):
    return Never(**options).double().eval()


def no_zeros():
    return tokens().clamp(min=1)


def test_a_token_that_never_follows_hides_no_loss_and_no_divergence():
    model, ids = never(), no_zeros()
    again = rerun(loaded(model), [ids], None, [("topk", 2, TopK(2))])
    assert measure_of(again) == "loss"
    with torch.no_grad():
        before = model(ids).log_softmax(-1)
        with sparsify(model, TopK(2)):
            after = model(ids).log_softmax(-1)
    terms = before[..., 1:].exp() * (before - after)[..., 1:]
    rows = again[again["mask"] == "topk"]
    assert rows["divergence"].tolist() == pytest.approx(terms.sum((1, 2)).tolist(), rel=1e-9)
    losses = -after[:, :-1].gather(-1, ids[:, 1:, None]).sum((1, 2))
    assert rows["loss"].tolist() == pytest.approx(losses.tolist(), rel=1e-9)


def test_outputs_that_stay_infinite_are_left_out_of_their_change():
    model, ids = never(columns=WORDS + 1), no_zeros()
    again = rerun(loaded(model), [ids], None, [("topk", 2, TopK(2))])
    with torch.no_grad():
        before = model(ids)[..., 1:]
        with sparsify(model, TopK(2)):
            after = model(ids)[..., 1:]
    want = (after - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    assert measure_of(again) == "output_change"
    assert again.loc[again["mask"] == "topk", "output_change"].tolist() == pytest.approx(want.tolist(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", [-math.inf, math.nan])
def test_of_a_change_that_is_no_finite_number_nobody_can_tell(spoilt):
    plan = KSweepPlan(LENGTH - 1, rerun=True, ks=(1, 2))
    model = loaded(never(columns=WORDS + 1, spoilt=spoilt), batches=[no_zeros()])
    found = Findings(survey([model], Conditions(plans=(plan,), dtype="float64", device="cpu")))
    verdict = sparse_verdict(found, "own:model")
    assert verdict.answer == "inconclusive"
    assert "inconclusive: some outputs are no finite numbers" in verdict.sentence
    table = change_table(found)
    assert table[table["mask"] == "topk"]["change"].tolist() == [math.inf] * 2
    said = rerun(loaded(never(spoilt=spoilt)), [no_zeros()], None, [("topk", 2, TopK(2))])
    assert measure_of(said) == "loss"
    assert not np.isfinite(said.loc[said["mask"] == "topk", "divergence"]).any()
