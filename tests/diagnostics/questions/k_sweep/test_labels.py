"""Labels are compared with logits that they fit, as transformers' own losses do, and with nothing else."""

import json

import pandas as pd
import pytest
import torch

import semdiag
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.outputs import _targets_of
from semdiag.measuring.survey import survey
from semdiag.questions.k_sweep.changes import change_table
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.k_sweep.rerun import rerun
from semdiag_files import InputError

transformers = pytest.importorskip("transformers", reason="needs the extra test-hf")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
SAMPLES, LENGTH, WORDS, CLASSES = 10, 12, 30, 3


def drawn(*shape, most=WORDS, seed=0, least=0):
    return torch.randint(least, most, shape, generator=torch.Generator().manual_seed(seed))


def with_ignored(labels):
    """The last two labels of each row do not count."""
    labels = labels.clone()
    labels[:, -2:] = -100
    return labels


def saved(folder, model):
    model.save_pretrained(folder)
    return folder


def vit():
    config = transformers.ViTConfig(image_size=8, patch_size=2, num_labels=CLASSES, **SMALL)
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return transformers.ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": drawn(SAMPLES, most=CLASSES),
    }


def bert():
    config = transformers.BertConfig(vocab_size=WORDS, num_labels=CLASSES, initializer_range=0.5, **SMALL)
    return transformers.BertForSequenceClassification(config), {
        "input_ids": drawn(SAMPLES, LENGTH),
        "labels": drawn(SAMPLES, most=CLASSES),
    }


def llama():
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SMALL)
    ids = drawn(SAMPLES, LENGTH, least=3)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": with_ignored(ids)}


def bart_decoder():
    """Of its labels the library moves none."""
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16, init_std=0.5
    )
    ids = drawn(SAMPLES, LENGTH, least=3)
    return transformers.BartForCausalLM(config), {"input_ids": ids, "labels": with_ignored(ids)}


def bidirectional_decoder():
    """Of its labels the library moves all, although it sees later tokens."""
    config = transformers.BertGenerationConfig(vocab_size=WORDS, initializer_range=0.5, **SMALL)
    ids = drawn(SAMPLES, LENGTH, least=3)
    return transformers.BertGenerationDecoder(config), {"input_ids": ids, "labels": with_ignored(ids)}


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    labels = with_ignored(drawn(SAMPLES, LENGTH - 3, seed=2))
    starts = torch.cat([torch.zeros(SAMPLES, 1, dtype=torch.int64), labels[:, :-1].clamp(0)], 1)
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": drawn(SAMPLES, LENGTH, least=2),
        "decoder_input_ids": starts,
        "labels": labels,
    }


def masked_bert():
    config = transformers.BertConfig(vocab_size=WORDS, initializer_range=0.5, **SMALL)
    ids = drawn(SAMPLES, LENGTH, least=3)
    shown = ids.clone()
    shown[:, ::3] = 2
    return transformers.BertForMaskedLM(config), {
        "input_ids": shown,
        "labels": torch.where(shown == 2, ids, torch.full_like(ids, -100)),
    }


def tagger():
    config = transformers.BertConfig(vocab_size=WORDS, num_labels=CLASSES, initializer_range=0.5, **SMALL)
    return transformers.BertForTokenClassification(config), {
        "input_ids": drawn(SAMPLES, LENGTH),
        "labels": with_ignored(drawn(SAMPLES, LENGTH, most=CLASSES, seed=3)),
    }


MODELS = [vit, bert, llama, t5, masked_bert, tagger]


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def made(request, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = request.param()
    torch.save(batch, tmp_path / "inputs.pt")
    return saved(tmp_path / "model", model), batch, tmp_path / "inputs.pt"


def swept(spec, inputs, **more):
    plan = KSweepPlan(2, rerun=True, ks=(1,))
    return survey([semdiag.load(spec, **more)], Conditions(inputs=inputs, plans=(plan,), dtype="float64"))


@pytest.mark.slow
def test_the_loss_without_a_mask_is_transformers_own(made):
    folder, batch, inputs = made
    named = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, named).from_pretrained(folder).double().eval()
    with torch.no_grad():
        output = model(**{n: x.double() if x.is_floating_point() else x for n, x in batch.items()})
    found = swept(f"hf:{folder}", inputs)
    row = change_table(Findings(found)).iloc[0]
    assert row["measure"] == "loss"
    # Both are means of at most a few hundred terms in float64; but the library works out the loss of causal
    # models, and the variances of T5's norms, in float32, which a GPU rounds otherwise.
    rounding = 1e-6 if named.endswith("CausalLM") or named.startswith("T5") else 1e-10
    assert row["before"] == pytest.approx(float(output.loss), rel=rounding)
    assert 0 <= row["accuracy"] <= 1
    expected = int((batch["labels"] != -100).sum()) - (SAMPLES if named == "LlamaForCausalLM" else 0)
    assert found.rerun[found.rerun["mask"] == "none"]["targets"].sum() == expected


@pytest.mark.parametrize("make", [bart_decoder, bidirectional_decoder])
def test_labels_belong_where_the_models_own_loss_has_them(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = make()
    model = model.double().eval()
    with torch.no_grad():
        own = float(model(**batch).loss)
    rows = rerun(unnamed(model), [batch], None, [])
    # The library works out some of these losses in float32.
    assert rows["loss"].sum() / rows["targets"].sum() == pytest.approx(own, rel=1e-6)


def test_a_loss_that_is_not_the_models_own_is_said():
    class Smoothed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = bert()[0].eval()

        def forward(self, input_ids, labels):
            logits = self.inner(input_ids).logits
            loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.5)
            return {"loss": loss, "logits": logits}

    batch, said = bert()[1], []
    for smoothed in (False, True):
        model = Smoothed() if smoothed else bert()[0].eval()
        rerun(unnamed(model), [batch], None, [], remark=lambda text, code: said.append((code, text)))
        assert [code for code, _ in said] == ["loss-of-logits"] * smoothed
    own = float(model(**batch)["loss"].detach())
    assert f"own loss is {own:.4g}" in said[0][1]


def test_without_its_head_labels_are_refused(made):
    folder, _, inputs = made
    if folder is not None and "T5" in (folder / "config.json").read_text():
        with pytest.raises(InputError):  # the body takes no labels
            swept(f"hf:{folder}", inputs, head="none")
        return
    with pytest.raises(InputError, match=r"(returns no logits to compare them with|unexpected keyword argument)"):
        swept(f"hf:{folder}", inputs, head="none")


@pytest.mark.slow
def test_attention_is_the_same_with_a_head_and_without(made, tmp_path):
    folder, batch, _ = made
    bare = {name: x for name, x in batch.items() if name != "labels"}
    torch.save(bare, tmp_path / "bare.pt")
    found = [
        survey([semdiag.load(f"hf:{folder}", head=head)], Conditions(inputs=tmp_path / "bare.pt"))
        for head in ("auto", "none")
    ]
    for table in ("queries", "loads", "heads"):
        one, other = (getattr(part, table).drop(columns="model") for part in found)
        assert one.equals(other)


def test_a_head_that_the_checkpoint_lacks_is_named(tmp_path):
    config = transformers.BertConfig(vocab_size=WORDS, num_labels=CLASSES, **SMALL)
    folder = saved(tmp_path / "model", transformers.BertForSequenceClassification(config))
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: w for n, w in weights.items() if "classifier" not in n},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    said = (
        r"lacks 2 parameters of the head of BertForSequenceClassification \(classifier.bias, classifier.weight\)"
    )
    with pytest.raises(InputError, match=said):
        semdiag.load(f"hf:{folder}")
    assert type(semdiag.load(f"hf:{folder}", head="none").module).__name__ == "BertModel"


@pytest.mark.parametrize("named", [None, [], ["NoSuchModel"], ["PreTrainedTokenizerFast"], [3], "BertModel", [""]])
def test_what_names_no_model_of_the_library_is_loaded_as_a_body(named, tmp_path):
    config = transformers.BertConfig(vocab_size=WORDS, **SMALL)
    folder = saved(tmp_path / "model", transformers.BertForMaskedLM(config))
    content = json.loads((folder / "config.json").read_text())
    content["architectures"] = named
    (folder / "config.json").write_text(json.dumps(content))
    huggingface_hub = pytest.importorskip("huggingface_hub")
    try:
        transformers.AutoConfig.from_pretrained(folder)
    except huggingface_hub.errors.StrictDataclassError:
        pytest.skip("this transformers refuses such a configuration")
    assert type(semdiag.load(f"hf:{folder}").module).__name__ == "BertModel"


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (drawn(SAMPLES, most=CLASSES) + CLASSES, r"the model's logits know the classes 0 to 2"),
        (-1 - drawn(SAMPLES, most=2), r"the model's logits know the classes 0 to 2"),
        (drawn(SAMPLES, 4, most=CLASSES), r"labels of shape \(10, 4\) do not fit"),
        (drawn(SAMPLES, LENGTH, most=CLASSES), r"labels of shape \(10, 12\) do not fit"),
        (drawn(4, most=CLASSES), r"an entry for each sample\. Got shape \(4,\) for 10 samples"),
        (torch.ones(SAMPLES, CLASSES, dtype=torch.bool), r"labels of shape \(10, 3\) do not fit"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, said):
    model, batch = bert()
    loaded = LoadedModel("own:model", "", model.double().eval(), "factory", "unknown")
    with pytest.raises(InputError, match=said):
        rerun(loaded, [{"input_ids": batch["input_ids"]}], labels, [])


def test_labels_that_are_truths_are_classes():
    model, batch = bert()
    loaded = LoadedModel("own:model", "", model.double().eval(), "factory", "unknown")
    truths = batch["labels"] > 0
    found = [rerun(loaded, [{"input_ids": batch["input_ids"]}], labels, []) for labels in (truths, truths.long())]
    assert found[0].equals(found[1])


class Decoder(torch.nn.Module):
    """A causal model by hand that takes its targets as a second argument, as nanoGPT does."""

    def __init__(self):
        super().__init__()
        config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SMALL)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = transformers.LlamaForCausalLM(config).double()

    def forward(self, idx, targets=None):
        return self.model(idx).logits, None


@pytest.mark.parametrize("moved", [True, False])
def test_targets_in_a_tuple_are_read_whether_they_are_the_tokens_or_the_next_ones(moved):
    ids = drawn(SAMPLES, LENGTH, least=3)
    after = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    model = Decoder().eval()
    with torch.no_grad():
        logits = model(ids)[0]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loaded = LoadedModel("own:model", "", model, "factory", "unknown")
    found = rerun(loaded, [(ids, after if moved else ids)], None, [])
    assert float(found["loss"].sum() / found["targets"].sum()) == pytest.approx(float(expected), rel=1e-10)


def test_targets_that_belong_to_no_position_are_refused():
    ids, model = drawn(SAMPLES, LENGTH, least=3), Decoder().eval()
    loaded = LoadedModel("own:model", "", model, "factory", "unknown")
    with pytest.raises(InputError, match="neither the tokens of the inputs nor the tokens after them"):
        rerun(loaded, [(ids, ids.flip(1))], None, [])


def test_labels_that_nobody_would_read_are_refused():
    model, batch = bert()
    model = model.eval()
    ids, labels = batch["input_ids"], batch["labels"]
    with pytest.raises(InputError, match="labels cannot be used here"):
        semdiag.measure(model, {"input_ids": ids}, labels=labels)
    with pytest.raises(InputError, match="labels are not read: mask stability compares no output"):
        semdiag.mask_stability(model, {"input_ids": ids}, labels)
    with pytest.raises(InputError, match=r"labels are not read: k-sweep .* rerun=True"):
        semdiag.k_sweep(model, {"input_ids": ids}, labels)


def test_labels_that_are_an_argument_are_compared():
    model, batch = bert()
    model, ids, labels = model.double().eval(), batch["input_ids"], batch["labels"]
    found = semdiag.k_sweep(model, {"input_ids": ids}, labels, rerun=True, ks=[1], dtype=torch.float64).rerun
    own = found[found["mask"] == "none"]
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(ids).logits, labels)
    assert own["targets"].sum() == SAMPLES
    assert float(own["loss"].sum() / SAMPLES) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("moved", [True, False])
def test_next_tokens_that_are_an_argument_are_read_as_those_of_a_tuple(moved):
    ids, model = drawn(SAMPLES, LENGTH, least=3), Decoder().eval()
    after = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    found = [semdiag.k_sweep(model, [(ids,)], labels, rerun=True, ks=[1]).rerun for labels in (after, ids, None)]
    pd.testing.assert_frame_equal(found[not moved], found[2])


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (drawn(SAMPLES, most=CLASSES), r"labels of shape \(10,\) do not fit the model's logits"),
        (
            drawn(SAMPLES, LENGTH, least=3),
            r"labels are neither the tokens of the inputs nor the tokens after them",
        ),
        (drawn(4, most=CLASSES), r"an entry for each sample\. Got shape \(4,\) for 10 samples"),
        (drawn(SAMPLES + 1, most=CLASSES), r"an entry for each sample\. Got shape \(11,\) for 10 samples"),
        ([0] * SAMPLES, r"labels are a tensor with an entry for each sample\. Got list"),
    ],
)
def test_labels_that_are_an_argument_and_fit_nothing_are_refused(labels, said):
    ids = drawn(SAMPLES, LENGTH, least=3).flip(0)
    with pytest.raises(InputError, match=said):
        semdiag.k_sweep(Decoder().eval(), [(ids,)], labels, rerun=True)


def test_what_labels_do_not_fit_is_counted_in_words():
    with pytest.raises(
        InputError, match=r"logits of 1 sample of 1 prediction among 3 classes\. Got torch\.float32\."
    ):
        _targets_of(torch.zeros(1), "labels", torch.zeros(1, 1, 3))


def test_labels_behind_the_inputs_of_a_model_that_takes_none_are_sent_to_their_argument():
    with pytest.raises(InputError, match=r"Labels that are no argument of the model go to labels=\."):
        semdiag.k_sweep(torch.nn.TransformerEncoderLayer(8, 2), [(torch.ones(2, 3, 8), *[torch.ones(2)] * 4)])


def test_labels_of_questions_are_named():
    config = transformers.BertConfig(vocab_size=WORDS, **SMALL)
    model, said = transformers.BertForQuestionAnswering(config).eval(), []
    loaded = LoadedModel("own:model", "", model, "factory", "unknown")
    places = drawn(SAMPLES, most=LENGTH)
    batch = {"input_ids": drawn(SAMPLES, LENGTH), "start_positions": places, "end_positions": places}
    rerun(loaded, [batch], None, [], remark=lambda text, code: said.append(text))
    assert (
        "of its inputs start_positions, end_positions are read by the model alone: its outputs are compared"
        in said
    )


def test_labels_of_an_encoder_have_the_shape_of_samples(wild_encoder, padded_tokens):
    encoder, tokens = wild_encoder("full"), padded_tokens[0]
    with pytest.raises(InputError, match="labels must be one class per sample, of shape"):
        semdiag.measure(encoder, tokens, labels=torch.zeros(len(tokens), 1, dtype=torch.int64))
