"""Labels in a tuple that would be another argument are refused; what is none is an argument."""

import pytest
import torch
from torch import nn

import semdiag
from semdiag.capturing.batches import refuse_unnamed_labels
from semdiag_files import InputError

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(24).view(4, 6)
CLASSES = torch.tensor([0, 1, 1, 0])


class Model(nn.Module):
    """Adds what it is given by its second argument to its inputs, and attends."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)

    def forward(self, x, y=None):
        return self.layer(x if y is None else x + y.view(-1, *[1] * (x.ndim - 1)))


def named(name):
    """A model whose second argument, which is optional, has a name."""
    return type("Named", (nn.Module,), {"forward": eval(f"lambda self, x, {name}=None: x")})()


ASKED = {
    "measure": lambda batches: semdiag.measure(Model().eval(), batches),
    "k-sweep": lambda batches: semdiag.k_sweep(Model().eval(), batches, ks=[2]),
    "rerun": lambda batches: semdiag.k_sweep(Model().eval(), batches, ks=[2], rerun=True),
    "compare": lambda batches: semdiag.compare(Model().eval(), Model().eval(), batches),
}


@pytest.mark.parametrize("question", ASKED)
@pytest.mark.parametrize("kind", [tuple, list])
def test_what_may_be_labels_is_refused_in_one_line(question, kind):
    said = (
        r"^Entry 1 of the batch may be labels, or the argument y of Model\. Give labels apart \(labels=\), or "
        r"name the arguments: {'x': …, 'y': …}\.$"
    )
    with pytest.raises(InputError, match=said):
        ASKED[question]([kind((X, CLASSES))])


@pytest.mark.parametrize("question", ASKED)
def test_an_argument_that_is_named_is_one(question):
    ASKED[question]([{"x": X, "y": CLASSES}])


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("y", CLASSES),
        ("y", CLASSES.double()),  # of a regression
        ("y", CLASSES > 0),
        ("extra", IDS),  # one for each position
        ("attention_mask", CLASSES),
        ("attention_mask", IDS),
        ("attention_mask", torch.full((4, 6), -100)),
    ],
)
def test_labels_of_every_kind_are_seen(name, given):
    with pytest.raises(InputError, match=rf"Entry 1 of the batch may be labels, or the argument {name} of Named"):
        refuse_unnamed_labels(named(name), (X, given))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("labels", CLASSES),
        ("targets", IDS),
        ("position_ids", IDS),
        ("lengths", CLASSES),
        ("attention_mask", torch.ones(4, 6, dtype=torch.int64)),
        ("key_padding_mask", torch.zeros(4, 6, dtype=torch.bool)),
        ("mask", torch.zeros(6, 6)),
        ("y", torch.zeros(6, 8)),  # of another number of samples
        ("y", X),  # of more axes
        ("context", torch.zeros(4, 8)),  # a vector a sample
        ("y", None),
    ],
)
def test_what_is_no_label_is_an_argument(name, given):
    refuse_unnamed_labels(named(name), (X, given))


def test_an_argument_that_must_be_given_is_one():
    class Two(nn.Module):
        def forward(self, x, y): ...

    class Any(nn.Module):
        def forward(self, *inputs): ...

    for model in (Two(), Any()):
        refuse_unnamed_labels(model, (X, CLASSES))


def test_tokens_for_labels_do_not_become_a_mask():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(InputError, match="may be labels, or the argument attention_mask of LlamaForCausalLM"):
        semdiag.k_sweep(model, [(IDS, IDS)], ks=[2])
