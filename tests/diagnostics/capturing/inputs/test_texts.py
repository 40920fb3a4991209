"""Texts that a user names: JSON lines, labels, targets, masks, lengths; and folders that are no models."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from semdiag.capturing.inputs import TextOptions, Tokeniser, read_texts, text_batches, tokeniser_of
from semdiag.capturing.loading import load
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.k_sweep.changes import change_table
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag_files import InputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TEXTS = ["a b c d e f", "g h i j k l m n", "o p a c e g", "b d f h"]


def tokenizer(folder, words=WORDS):
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


def saved(folder, kind, config, **fields):
    folder.mkdir(exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config(**fields)).eval()
    model.save_pretrained(folder)
    tokenizer(folder)
    return model


@pytest.fixture
def classifier(tmp_path):
    """A classifier of three named classes."""
    saved(
        tmp_path / "classes", transformers.BertForSequenceClassification, transformers.BertConfig,
        vocab_size=len(WORDS), num_labels=3, id2label={0: "no", 1: "maybe", 2: "yes"},
        label2id={"no": 0, "maybe": 1, "yes": 2}, **SMALL,
    )  # fmt: skip
    return tmp_path / "classes"


def lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def loss_of(findings):
    again = findings.measurements.rerun
    own = again[again["mask"] == "none"]
    return own["loss"].sum() / own["targets"].sum()


def swept(folder, inputs, **options):
    plan = KSweepPlan(rerun=True, ks=(2,), kinds=("topk",))
    return Findings(survey([f"hf:{folder}"], Conditions(inputs=inputs, plans=(plan,), **options)))


def test_a_document_of_several_paragraphs_is_one_text(tmp_path, classifier):
    path = lines(tmp_path / "texts.jsonl", [{"text": "a b\n\nc d"}, {"text": "e"}])
    assert read_texts(path).texts == ["a b\n\nc d", "e"]
    (batch,) = text_batches(path, load(f"hf:{classifier}"), 10, TextOptions())
    assert batch["attention_mask"].sum(1).tolist() == [6, 3]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["jsonl", "names", "numbers"])
def test_the_loss_of_classes_is_the_models_own(tmp_path, classifier, where):
    names, numbers = ["yes", "no", "maybe", "yes"], [2, 0, 1, 2]
    options = {}
    if where == "jsonl":
        rows = [{"text": text, "label": name} for text, name in zip(TEXTS, names, strict=True)]
        path = lines(tmp_path / "texts.jsonl", rows)
    else:
        path, labels = tmp_path / "texts.txt", tmp_path / "labels.txt"
        path.write_text("\n".join(TEXTS), encoding="utf-8")
        labels.write_text("\n".join(map(str, names if where == "names" else numbers)), encoding="utf-8")
        options = {"texts": TextOptions(labels=labels)}
    found = swept(classifier, path, **options)
    model = transformers.BertForSequenceClassification.from_pretrained(classifier)
    batch = transformers.BertTokenizer.from_pretrained(classifier)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        own = model(**batch, labels=torch.tensor(numbers)).loss.item()
    assert loss_of(found) == pytest.approx(own, rel=1e-5)
    assert set(found(change_table)["measure"]) == {"loss"}


@pytest.mark.slow
def test_a_masked_language_model_is_asked_for_masked_tokens(tmp_path):
    folder = tmp_path / "masked"
    kind, config = transformers.BertForMaskedLM, transformers.BertConfig
    model = saved(folder, kind, config, vocab_size=len(WORDS), **SMALL)
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    found = swept(folder, path, seed=3)
    own = load(f"hf:{folder}")
    (batch,) = text_batches(path, own, 10, TextOptions())
    tokenise = tokeniser_of(path, own, TextOptions())
    ids, labels = tokenise.mask(batch["input_ids"], 3)
    assert ((labels != -100).sum(1) == torch.tensor([1, 1, 1, 1])).all()  # 15% of 6, 8, 6, 4
    assert set(batch["input_ids"][labels != -100].tolist()).isdisjoint({0, 2, 3})
    assert (ids[labels != -100] == WORDS.index("[MASK]")).all()
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels).loss.item()
    assert loss_of(found) == pytest.approx(want, rel=1e-5)
    said = found.measurements.remarks["text"].tolist()
    assert "run with 15% of the tokens masked (seed 3): the loss is that of these tokens" in said


def on_the_left(folder):
    """Let a tokenizer pad in front of texts, and return it."""
    transformers.BertTokenizer.from_pretrained(folder, padding_side="left").save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
def test_a_text_has_the_positions_that_it_has_alone_whatever_side_its_tokenizer_pads(tmp_path):
    """GPT-2 counts positions from the first column: padding in front of a text moved them."""
    folder = tmp_path / "gpt2"
    kind, config = transformers.GPT2LMHeadModel, transformers.GPT2Config
    fields = {"vocab_size": len(WORDS), "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = saved(folder, kind, config, initializer_range=0.5, **fields)
    tokenise = on_the_left(folder)
    assert tokenise(TEXTS, padding=True)["attention_mask"][3][0] == 0
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    total = targets = 0
    for text in TEXTS:
        alone = tokenise(text, return_tensors="pt")
        more = alone["input_ids"].shape[1] - 1
        with torch.no_grad():
            total += model(**alone, labels=alone["input_ids"]).loss.item() * more
        targets += more
    assert loss_of(swept(folder, path)) == pytest.approx(total / targets, rel=1e-5)


def test_a_model_that_reads_the_last_column_is_padded_in_front(tmp_path):
    folder = tmp_path / "xlnet"
    fields = {"vocab_size": len(WORDS), "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    saved(folder, transformers.XLNetForSequenceClassification, transformers.XLNetConfig, **fields)
    on_the_left(folder)
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    (batch,) = text_batches(path, load(f"hf:{folder}"), 10, TextOptions())
    assert batch["attention_mask"][3].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["T5", "MBart"])
def test_a_sequence_to_sequence_model_answers_with_its_targets(tmp_path, family):
    """MBart begins its decoder's input with the last token of the target."""
    folder = tmp_path / "answers"
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    if family == "MBart":
        part = {"layers": 2, "attention_heads": 2, "ffn_dim": 16}
        sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in part.items()}
        sizes = {"d_model": 16, **sides}
    fields = {"vocab_size": len(WORDS), "decoder_start_token_id": 0, "pad_token_id": 0, **sizes}
    kinds = (getattr(transformers, f"{family}{name}") for name in ("ForConditionalGeneration", "Config"))
    model = saved(folder, *kinds, **fields)
    targets = ["a b", "c d e f", "g", "h i"]
    rows = [{"text": text, "target": target} for text, target in zip(TEXTS, targets, strict=True)]
    found = swept(folder, lines(tmp_path / "texts.jsonl", rows))
    known = transformers.BertTokenizer.from_pretrained(folder)
    batch, answers = (known(texts, padding=True, return_tensors="pt") for texts in (TEXTS, targets))
    labels = answers["input_ids"].masked_fill(answers["attention_mask"] == 0, -100)
    with torch.no_grad():
        own = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
        ).loss.item()
    assert loss_of(found) == pytest.approx(own, rel=1e-5)


def test_a_model_that_cannot_shift_its_targets_is_refused_in_one_line(tmp_path):
    """Bart's shift needs a padding token, which this configuration lacks."""
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    fields = {"vocab_size": len(WORDS), "d_model": 16, "pad_token_id": None, "decoder_start_token_id": 2}
    saved(
        tmp_path / "answers", transformers.BartForConditionalGeneration, transformers.BartConfig, **fields, **sizes
    )
    path = lines(tmp_path / "texts.jsonl", [{"text": "a", "target": "b"}])
    with pytest.raises(InputError, match=r"^The model takes no targets \(\w+: .*pad_token_id"):
        text_batches(path, load(f"hf:{tmp_path / 'answers'}"), 10, TextOptions())


class Translator:
    """A tokenizer whose other language has other tokens."""

    pad_token, padding_side, model_max_length = "[PAD]", "right", 16

    def __call__(self, texts=None, text_target=None, **how):
        words = text_target or texts
        ids = [[1 + len(word) + 10 * (text_target is not None) for word in text.split()] for text in words]
        return {"input_ids": torch.tensor(ids)}


def test_targets_are_tokens_of_the_other_language():
    tokenise = Tokeniser("translator", Translator(), torch.nn.Identity())
    assert tokenise(["a bb", "ccc d"])["input_ids"].tolist() == [[2, 3], [4, 2]]
    assert tokenise(["a bb", "ccc d"], targets=True)["input_ids"].tolist() == [[12, 13], [14, 12]]


@pytest.mark.parametrize(
    ("rows", "labels", "said"),
    [
        ([{"text": "a", "label": 3}], None, r"the model has 3 classes, 0 to 2\. Got 3"),
        ([{"text": "a", "label": "no way"}], None, r"no class 'no way'\. Its classes: no, maybe, yes"),
        ([{"text": "a", "label": 1.5}], None, r"a label must be a whole number or a name"),
        ([{"text": "a", "label": True}], None, r"a label must be a whole number or a name"),
        ([{"text": "a", "target": "b"}], None, r"Targets are for sequence-to-sequence models"),
        (
            [{"text": "a", "label": 1}, {"text": "b"}],
            None,
            r"line 2: label and target must be in every line or in none",
        ),
        (
            [{"text": "a"}, {"text": "b", "label": 1}],
            None,
            r"line 2: label and target must be in every line or in none",
        ),
        ([{"text": "a"}, {"words": "b"}], None, r"line 2: each line must be an object like"),
        ([{"text": "a"}, "b"], None, r"line 2: each line must be an object like"),
        ([{"text": " "}], None, r"line 1: each line must be an object like"),
        ([{"text": "a"}], "--5", r"no class '--5'\. Its classes: no, maybe, yes"),
        ([{"text": "a"}], "²", r"no class '²'"),
        ([{"text": "a"}], "-", r"no class '-'"),
        ([{"text": "a"}], "9" * 5000, r"no class '9{40}'"),
        ([{"text": "a"}], "-5", r"the model has 3 classes, 0 to 2\. Got -5"),
        ([{"text": "a", "label": 10**400}], None, r"a label must be a whole number or a name.* Got 10{39}\.$"),
        ([{"text": "a"}, {"text": "b"}], "1", r"labels\.txt has 1 label, but .*texts\.jsonl has 2 texts"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, classifier, rows, labels, said):
    path = lines(tmp_path / "texts.jsonl", rows)
    options = TextOptions()
    if labels is not None:
        (tmp_path / "labels.txt").write_text(labels, encoding="utf-8")
        options = TextOptions(labels=tmp_path / "labels.txt")
    with pytest.raises(InputError, match=said) as error:
        text_batches(path, load(f"hf:{classifier}"), 10, options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("BertLMHeadModel", r"names a class for each text, but BertLMHeadModel predicts tokens\."),
        ("BertModel", r"BertModel takes no labels"),
    ],
)
def test_labels_of_a_model_without_classes_are_refused(tmp_path, kind, said):
    saved(tmp_path / "model", getattr(transformers, kind), transformers.BertConfig, vocab_size=len(WORDS), **SMALL)
    path = lines(tmp_path / "texts.jsonl", [{"text": "a", "label": 1}])
    with pytest.raises(InputError, match=said):
        text_batches(path, load(f"hf:{tmp_path / 'model'}"), 10, TextOptions())


def test_texts_are_cut_where_the_user_says_and_short_ones_are_said_to_be_short(tmp_path, classifier):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    found = survey([f"hf:{classifier}"], Conditions(inputs=path, texts=TextOptions(max_length=5)))
    said = found.remarks["text"].tolist()
    assert "texts were cut to 5 tokens, by --max-length: 4 of 4" in said
    assert (
        "the texts have at most 5 of the 512 tokens that the model takes: they say nothing about long ones" in said
    )
    assert found.queries["keys"].max() == 5


def test_a_tokenizer_of_ones_own_is_read_and_another_models_is_told(tmp_path, classifier):
    other, path = tmp_path / "other", tmp_path / "texts.txt"
    other.mkdir()
    path.write_text("a b zz", encoding="utf-8")
    tokenizer(other, [*WORDS, *(f"z{n}" for n in range(9)), "zz"])
    with pytest.raises(
        InputError, match=r"gives the token id 30, but the model has 21 tokens: it is another model's"
    ):
        text_batches(path, load(f"hf:{classifier}"), 10, TextOptions(tokenizer=other))
    mine, theirs = (
        text_batches(path, load(f"hf:{classifier}"), 10, options)[0]["input_ids"].tolist()
        for options in (TextOptions(), TextOptions(tokenizer=classifier))
    )
    assert mine == theirs
    with pytest.raises(InputError, match=r"There is no folder"):
        text_batches(path, load(f"hf:{classifier}"), 10, TextOptions(tokenizer=tmp_path / "nowhere"))


def test_options_of_texts_go_with_texts(tmp_path, classifier, tiny_runs):
    torch.save({"input_ids": torch.ones(2, 4).long()}, tmp_path / "ids.pt")
    with pytest.raises(InputError, match=r"are for texts"):
        survey([f"hf:{classifier}"], Conditions(inputs=tmp_path / "ids.pt", texts=TextOptions(max_length=5)))
    with pytest.raises(InputError, match=r"texts of external models"):
        survey([tiny_runs.full], Conditions(samples=4, texts=TextOptions(max_length=5)))
    with pytest.raises(InputError, match=r"--max-length must be at least 2"):
        TextOptions(max_length=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_that_of_the_model_and_scores_are_read_in_float32(tmp_path, classifier, dtype):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    half, whole = (
        survey([f"hf:{classifier}"], Conditions(inputs=path, dtype=name)).queries for name in (dtype, "float32")
    )
    assert len(half) == len(whole)
    difference = (half["dispersion"] - whole["dispersion"]).abs().max()
    assert 0 < difference < 0.05 * whole["dispersion"].max()  # 8 bits of queries and keys


def test_half_precision_is_not_for_encoders_of_ours(tiny_runs):
    with pytest.raises(InputError, match=r"dtype bfloat16 is for external models"):
        survey([tiny_runs.full], Conditions(samples=4, dtype="bfloat16"))


def test_folders_that_hold_no_whole_model_are_told_what_would_work(tmp_path, classifier):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"holds an adapter, not a model\. Merge it first: .*merge_and_unload"):
        load(f"hf:{adapter}")
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    folder = Path(shutil.copytree(classifier, tmp_path / "shards"))
    (folder / "model.safetensors").rename(folder / shards[1])
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InputError, match=r"lacks model-00001-of-00002\.safetensors of the 2 files of its weights"):
        load(f"hf:{folder}")


def test_a_token_says_its_text_and_of_part_of_a_character_its_name(tmp_path, classifier):
    tokenizers = pytest.importorskip("tokenizers")
    letters = {
        letter: number for number, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    own = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path / "bytes")
    tokenise = tokeniser_of(tmp_path, load(f"hf:{classifier}"), TextOptions(tokenizer=tmp_path / "bytes"))
    ids = own.encode("a é\n").ids
    assert tokenise.pieces([*ids, 999]) == ["a", " ", "Ã", "©", "\n", "999"]
