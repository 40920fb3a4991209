"""Folders in the Hugging Face format: read offline, as data, whole or not at all."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch

from semdiag import load
from semdiag.capturing.inputs.files import read_batches
from semdiag.measuring.array_files import read_arrays
from semdiag.measuring.conditions import Conditions
from semdiag.measuring.survey import survey
from semdiag_models import InputError

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
    with pytest.raises(InputError, match=r"there is no folder bert-base-uncased.* wrote[.]$"):
        load("hf:bert-base-uncased")


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


def test_without_transformers_the_command_to_install_it_is_named(bert):
    code = f"import sys; sys.modules['transformers'] = None; import semdiag; semdiag.load('hf:{bert}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the library transformers. Install it with: pip install 'semdiag[hf]'." in done.stderr


def test_the_library_speaks_as_before(bert):
    level = transformers.utils.logging.get_verbosity()
    load(f"hf:{bert}")
    assert transformers.utils.logging.get_verbosity() == level


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"weight_map": []}', '{"weight_map": {"a": [1]}}'])
def test_an_index_that_is_none_is_refused(copied, content):
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
