"""What a model's output is read as: a distribution over classes or tokens, or a representation."""

import pytest
import torch

from semdiag.capturing.kept_keys import TopK
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.sparsify import sparsify
from semdiag.findings.findings import Findings
from semdiag.findings.sparse_verdict import sparse_verdict
from semdiag.measurement.conditions import Conditions
from semdiag.measurement.probes.k_sweep import KSweepPlan
from semdiag.measurement.probes.rerun import measure_of, rerun
from semdiag.measurement.survey import survey

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
    again = rerun(loaded(model), [batch], None, [("topk", 1, TopK(1))], remark=said.append)
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
        again = rerun(loaded(model), [batch], labels, [], remark=said.append)
        assert measure_of(again) == "output_change"
    assert len(said) == 2
    assert all(text.endswith("the labels are floating-point numbers, no classes") for text in said)
    classes = rerun(loaded(model), [{"input_ids": ids, "labels": ids[:, 0] % 4}], None, [], remark=said.append)
    assert (measure_of(classes), len(said)) == ("loss", 2)


def test_a_model_with_one_logit_is_not_said_to_lose_nothing():
    plan = KSweepPlan(LENGTH - 1, rerun=True, ks=(1, LENGTH - 1))
    model = loaded(classifier(num_labels=1), batches=[{"input_ids": tokens()}])
    found = survey([model], Conditions(plans=(plan,), dtype="float64"))
    verdict = sparse_verdict(Findings(found), "own:model")
    assert (verdict.measure, verdict.reason) == ("output_change", "")
    assert found.remarks["text"].str.startswith("logits are compared as outputs").sum() == 1
