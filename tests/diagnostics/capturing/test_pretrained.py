"""Folders in the Hugging Face format: read offline, as data, whole or not at all."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch

from semdiag import load
from semdiag.capturing.inputs import read_batches
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.selections.arrays import read_arrays
from semdiag_files import InputError

transformers = pytest.importorskip("transformers", reason="needs the extra test-hf")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "."]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with a random BERT of two layers and a tokenizer of ten words."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=8, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary, model_max_length=100).save_pretrained(folder)
    return folder


@pytest.fixture
def copied(bert, tmp_path):
    """A copy of the folder to damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in bert.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_the_model_is_that_of_the_folder(bert):
    model = load(f"hf:{bert}")
    own = transformers.BertModel.from_pretrained(bert)
    ids = torch.tensor([[2, 4, 5, 3]])
    assert torch.equal(model.module(ids).last_hidden_state, own.eval()(ids).last_hidden_state)
    assert (model.external, model.source, model.module.training) == (True, "hugging face", False)
    assert model.sha256 == hashlib.sha256((bert / "model.safetensors").read_bytes()).hexdigest()
    assert model.provenance == {"transformers": transformers.__version__}


def test_a_folder_in_an_installed_package_is_found_without_importing_it(bert, tmp_path, monkeypatch):
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    (package / "weights").symlink_to(bert)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("hf:carrier/weights").module.config.num_hidden_layers == 2


def test_texts_become_padded_batches(bert, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat\n\nthe cat\n  cat sat on the mat . the cat sat on the mat .\n", encoding="utf-8")
    first, second = read_batches(texts, load(f"hf:{bert}"), 2)
    assert first["input_ids"].tolist() == [[2, 4, 5, 6, 3], [2, 4, 5, 3, 0]]
    assert first["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert second["input_ids"].shape == (1, 8)  # cut to the model's 8 positions, not the tokenizer's 100


def test_a_text_ends_where_its_line_ends_and_nowhere_else(bert, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_bytes("\ufeffthe \u2028 cat \x0c sat \x85 on\r\nmat\n".encode())
    (batch,) = read_batches(texts, load(f"hf:{bert}"), 2)
    assert batch["attention_mask"].sum(1).tolist() == [6, 3]


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_padded_without_a_token_for_it(side, bert, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(WORDS)}, "[UNK]")
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=own, padding_side=side)
    assert (bare.pad_token, bare.eos_token, bare.unk_token) == (None, None, None)
    folder = tmp_path / "gpt2"
    config = transformers.GPT2Config(vocab_size=len(WORDS), n_positions=8, n_embd=16, n_layer=1, n_head=2)
    with torch.random.fork_rng():
        transformers.GPT2Model(config).save_pretrained(folder)
    bare.save_pretrained(folder)
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat\ncat\n" + 5 * "the cat " + "\n", encoding="utf-8")
    first, second = read_batches(texts, load(f"hf:{folder}"), 2)
    assert first["input_ids"].tolist() == [[4, 5, 6], [5, 0, 0]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert second["input_ids"].shape == (1, 8)
    found = survey([load(f"hf:{folder}")], Conditions(inputs=texts)).queries
    assert found.groupby("sample").size().tolist() == [2 * 3, 2 * 1, 2 * 8]


@pytest.mark.parametrize(("first", "said"), [(None, ["2 of 3"]), (2, ["1 of 2"]), (1, [])])
def test_it_is_said_how_many_texts_were_cut(bert, tmp_path, first, said):
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat on the mat\n" + 2 * "the cat sat on the mat .\n", encoding="utf-8")  # 8, 9, 9
    found = survey([load(f"hf:{bert}")], Conditions(inputs=texts, first=first)).remarks
    expected = [f"texts were cut to 8 tokens, the model's limit: {cut}" for cut in said]
    assert found[found["severity"] == "warning"]["text"].tolist() == expected


def saved_beside(bert, kind, config):
    """The folder of a random model with BERT's tokenizer."""
    folder = bert.parent / kind.__name__
    with torch.random.fork_rng():
        kind(config).save_pretrained(folder)
    for file in bert.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_positions_that_begin_behind_that_of_padding_are_not_counted(bert, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.RobertaConfig(vocab_size=10, max_position_embeddings=8, pad_token_id=1, **sizes)
    folder = saved_beside(bert, transformers.RobertaModel, config)
    texts = tmp_path / "texts.txt"
    texts.write_text(3 * "the cat sat " + "\n", encoding="utf-8")
    model = load(f"hf:{folder}")
    (batch,) = read_batches(texts, model, 1)
    assert batch["input_ids"].shape == (1, 6)
    model.module(**batch)


def test_an_encoder_decoder_gets_the_texts_shifted_as_decoder_input(bert, tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=10, decoder_start_token_id=0, **sizes)
    folder = saved_beside(bert, transformers.T5Model, config)
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat\ncat\n", encoding="utf-8")
    model = load(f"hf:{folder}")
    (batch,) = read_batches(texts, model, 2)
    assert batch["decoder_input_ids"].tolist() == [[0, 2, 4, 5], [0, 2, 5, 3]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    model.module(**batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "holds no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no .safetensors file; other formats are not read"),
        (lambda f: (f / "model.safetensors").write_bytes(b"damaged"), "cannot be loaded"),
        (lambda f: (f / "config.json").write_text('{"model_type": "of my own"}'), "cannot be loaded"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(copied, change, message):
    change(copied)
    with pytest.raises(InputError, match=message) as refused:
        load(f"hf:{copied}")
    assert "\n" not in str(refused.value)


def test_a_model_part_of_which_would_be_random_is_refused(copied):
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    gone = "encoder.layer.1.attention.self.query.weight"
    save_file({n: w for n, w in weights.items() if n != gone}, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 of the model's parameters \(encoder\.layer\.1\.attention"):
        load(f"hf:{copied}")


def rewritten(folder, change):
    """Put other tensors into a folder's weights."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({n: w for name, weight in load_file(file).items() for n, w in change(name, weight)}, file)


def configured(folder, **entries):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | entries), encoding="utf-8")


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "gguf", "dequantize": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "of my own"},
        {"load_in_8bit": True},
        None,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_are_read_whatever_their_configuration_says_of_quantising(bert, copied, declared, dtype):
    own = load(f"hf:{bert}").module.to(dtype).float()
    rewritten(copied, lambda name, weight: [(name, weight.to(dtype))])
    configured(copied, quantization_config=declared)
    model = load(f"hf:{copied}").module
    ids = torch.tensor([[2, 4, 5, 3]])
    assert torch.equal(model.float()(ids).last_hidden_state, own(ids).last_hidden_state)
    assert not hasattr(model.config, "quantization_config")


PACKINGS = {  # as the libraries write a matrix
    "gptq": lambda n, w: [(n.replace("weight", "qweight"), w.to(torch.int32)), (n.replace("weight", "scales"), w)],
    "bitsandbytes-8": lambda n, w: [(n, w.to(torch.int8)), (n.replace("weight", "SCB"), w[:, 0].clone())],
    "bitsandbytes-4": lambda n, w: [(n, w.to(torch.uint8).view(-1, 1)), (f"{n}.absmax", w[:, 0].clone())],
    "fp8": lambda n, w: [(n, w.to(torch.float8_e4m3fn)), (f"{n}_scale_inv", w[:1, :1].clone())],
    "compressed": lambda n, w: [(f"{n}_packed", w.to(torch.int32)), (f"{n}_scale", w[:1, :1].clone())],
    "mxfp4": lambda n, w: [(n.replace("weight", "blocks"), w.to(torch.uint8))],
    "hqq": lambda n, w: [(n.replace("weight", "W_q"), w.to(torch.uint8))],
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("declared", [{}, {"quantization_config": {"quant_method": "x"}}], ids=["hidden", "said"])
def test_packed_weights_are_refused_whatever_their_configuration_says(copied, packing, declared):
    matrix = "encoder.layer.0.attention.self.query.weight"
    rewritten(copied, lambda n, w: PACKINGS[packing](n, w) if n == matrix else [(n, w)])
    configured(copied, **declared)
    with pytest.raises(InputError, match=r"its weights are quantised \(encoder\.layer\.0\.attention\.\S+ of type"):
        load(f"hf:{copied}")


def test_masks_and_places_in_buffers_are_no_packed_weights(copied):
    more = {"attn.bias": torch.ones(4, 4, dtype=torch.uint8), "places": torch.arange(4, dtype=torch.int32)}
    rewritten(copied, lambda n, w: [(n, w), *(more.items() if "word" in n else ())])
    load(f"hf:{copied}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("copy", "with 'quotes\"")), "back\\slash"],
)
def test_the_recipe_for_a_folder_of_bin_files_keeps_head_and_tokenizer(bert, tmp_path, name):
    folder = tmp_path / name
    config = transformers.BertConfig.from_pretrained(bert, num_labels=3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        own = transformers.BertForSequenceClassification(config).eval()
    own.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(own.state_dict(), folder / "pytorch_model.bin")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    with pytest.raises(
        InputError, match=r"but pytorch_model\.bin, which may hold code and is not read"
    ) as refused:
        load(f"hf:{folder}", head="none")
    recipe = str(refused.value).partition("in Python: ")[2]
    subprocess.run([sys.executable, "-c", recipe], cwd=tmp_path, check=True, capture_output=True)
    model = load(f"hf:{tmp_path / 'NEW'}")
    (tmp_path / "texts.txt").write_text("the cat\n", encoding="utf-8")
    (batch,) = read_batches(tmp_path / "texts.txt", model, 2)
    assert batch["input_ids"].tolist() == [[2, 4, 5, 3]]
    weights = model.module.state_dict()
    assert weights.keys() == own.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in own.state_dict().items())


def test_the_recipe_names_no_tokenizer_where_there_is_none(copied):
    for file in copied.glob("*token*"):
        file.unlink()
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(
        InputError, match=r"import BertModel; BertModel\.from_pretrained\(.*\.save_pretrained\(.NEW.\)$"
    ):
        load(f"hf:{copied}")


@pytest.mark.parametrize("name", ["model.gguf", "consolidated.00.pth", "tf_model.h5"])
def test_files_that_from_pretrained_does_not_take_get_no_recipe_with_it(copied, name):
    (copied / "model.safetensors").rename(copied / name)
    with pytest.raises(InputError, match=rf"but {name}, which is not read\. Load it with its own library"):
        load(f"hf:{copied}")


def test_code_that_comes_with_a_model_is_never_run(copied):
    mark = copied / "ran"
    (copied / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Own: pass\n", encoding="utf-8")
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "own-kind", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match="cannot be loaded"):
        load(f"hf:{copied}")
    assert not mark.exists()


def test_without_a_tokenizer_texts_are_refused(copied, tmp_path):
    for file in copied.glob("token*"):
        file.unlink()
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat\n", encoding="utf-8")
    with pytest.raises(
        InputError,
        match=r"holds no tokenizer: .* Give token ids with --inputs FILE\.pt, or name .* --tokenizer DIR\.$",
    ):
        read_batches(texts, load(f"hf:{copied}"), 2)


def test_nothing_is_downloaded():
    with pytest.raises(InputError, match=r"there is no folder bert-base-uncased.* hf:bert-base-uncased[.]$"):
        load("hf:bert-base-uncased")
    with pytest.raises(InputError, match=r"there is no folder /nowhere/bert.* wrote[.]$"):
        load("hf:/nowhere/bert")


def test_the_copy_of_a_model_in_the_cache_is_named(tmp_path, monkeypatch):
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc", encoding="utf-8")
    (kept / "snapshots" / "abc").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=f"there is no folder some/model.* hf:{kept / 'snapshots' / 'abc'}[.]$"):
        load("hf:some/model")


def test_a_file_is_refused_and_its_folder_named(copied):
    with pytest.raises(InputError, match=f"model.safetensors is a file in the folder hf:{copied}[.]"):
        load(f"hf:{copied / 'model.safetensors'}")


@pytest.mark.slow
def test_without_transformers_the_command_to_install_it_is_named(bert):
    code = f"import sys; sys.modules['transformers'] = None; import semdiag; semdiag.load('hf:{bert}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the library transformers. Install it with: pip install transformers." in done.stderr


def test_the_library_speaks_as_before(bert):
    level = transformers.utils.logging.get_verbosity()
    load(f"hf:{bert}")
    assert transformers.utils.logging.get_verbosity() == level


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"weight_map": []}', '{"weight_map": {"a": [1]}}'])
def test_an_index_that_is_none_is_refused(copied, content):
    (copied / "model.safetensors").rename(copied / "model-1.safetensors")
    (copied / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"index\.json is no index of weights: it has no weight_map"):
        load(f"hf:{copied}")


@pytest.mark.parametrize("name", ["vocab.txt", "additional_chat_templates/tool.jinja", "more.safetensors"])
def test_links_to_what_never_ends_are_refused_before_the_library_opens_them(copied, name):
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).unlink(missing_ok=True)
    (copied / name).symlink_to("/proc/self/environ")  # as /proc/kmsg, which only some may open
    with pytest.raises(InputError, match="is no regular file"):
        load(f"hf:{copied}")


def test_a_header_of_weights_that_no_model_needs_is_refused_unread(copied):
    header = b'{"a":' + b"[" * 2**24 + b"]" * 2**24 + b"}"
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (copied / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"its header has 33,554,438 bytes; .* has up to 16,777,216"):
        load(f"hf:{copied}")
    with pytest.raises(InputError, match=r"its header has 33,554,438 bytes"):
        read_arrays(copied / "model.safetensors", ["a"])


def in_shards(folder, name):
    """Let an index say that all weights of a folder are in one file."""
    from safetensors.torch import load_file

    parameters = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").rename(folder / "mine.safetensors")
    content = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(parameters, name)})
    (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")


def doubled(folder, name):
    """Write the weights of a folder, times two, to another file; return its hash."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    (folder / name).parent.mkdir(exist_ok=True)
    save_file({key: 2 * value for key, value in weights.items()}, folder / name, {"format": "pt"})
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("way", ["index", "index of a subfolder", "configuration", "beside a whole model"])
def test_the_hash_is_of_the_file_that_is_loaded(bert, copied, way):
    name = "more/x.safetensors" if way == "index of a subfolder" else "x.safetensors"
    digest, factor = doubled(copied, name), 2
    if way.startswith("index"):
        in_shards(copied, name)
    elif way == "configuration":
        configured(copied, transformers_weights=name)
    else:  # the library reads model.safetensors alone
        digest, factor = hashlib.sha256((bert / "model.safetensors").read_bytes()).hexdigest(), 1
    model, first = load(f"hf:{copied}"), load(f"hf:{bert}")
    weight = "embeddings.word_embeddings.weight"
    assert torch.equal(model.module.state_dict()[weight], factor * first.module.state_dict()[weight])
    assert model.sha256 == digest


@pytest.mark.parametrize(
    "name", ["../bert/model.safetensors", "{bert}/model.safetensors", "a/../../x.safetensors", "x.bin"]
)
@pytest.mark.parametrize("way", ["index", "configuration"])
def test_weights_outside_the_folder_are_refused(bert, copied, name, way):
    name = name.format(bert=bert)
    if way == "index":
        in_shards(copied, name)
    else:
        configured(copied, transformers_weights=name)
    with pytest.raises(InputError, match=r"They must be \.safetensors files inside its folder\.$"):
        load(f"hf:{copied}")
