"""Configurations that describe another model than their files hold: refused before memory is set aside."""

import json

import pytest
import torch

from semdiag.capturing import inputs as tokenising
from semdiag.capturing import loading
from semdiag_files import InputError

transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402

SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 10,
}


def folder(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(10)}, path / "model.safetensors")
    return f"hf:{path}"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "describes a model of more than 10,000,030 parameters, but its files hold 10"),
        ({"model_type": "vit", "image_size": 10**9}, "describes a model of more than"),
        (
            {"model_type": "gpt2", "n_positions": 10**12, "n_embd": 8, "n_layer": 1},
            "describes a model of more than",
        ),
        (
            {"model_type": "bert", **SMALL, "num_labels": 2**31},
            "num_labels = 2.15e+09, but its files hold 1 tensor",
        ),
        ({"model_type": "bert", **SMALL, "num_hidden_layers": 20_000}, "num_hidden_layers = 2e+04"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**12}, "num_hidden_layers = 1e+12"),
        ({"model_type": "llama", "vocab_size": 10**400}, "a number is too large"),
    ],
)
def test_what_no_file_holds_is_refused_at_once(tmp_path, config, said):
    before = torch.nn.modules.module._global_parameter_registration_hooks.copy()
    with pytest.raises(InputError) as caught:
        loading.load(folder(tmp_path / "model", config))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.nn.modules.module._global_parameter_registration_hooks == before


@pytest.mark.parametrize(
    "shape", ["x", ["x"], [-1, 10], [1.5], [10**18] * 8, [2**40, 2**40], [3] * 10_000, [True]]
)
def test_a_header_whose_shapes_are_none_is_refused_in_a_line(tmp_path, shape):
    spec = folder(tmp_path / "model", {"model_type": "bert", **SMALL})
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 40]}}).encode()
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(40))
    with pytest.raises(InputError) as caught:
        loading.load(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_loaded_whether_its_embeddings_are_tied_or_not(tmp_path, tied):
    shape = {**SMALL, "num_key_value_heads": 1, "vocab_size": 3_000_000, "tie_word_embeddings": tied}
    config = transformers.LlamaConfig(**{**shape, "hidden_size": 2, "num_attention_heads": 1})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    assert type(loading.load(f"hf:{tmp_path / 'model'}").module).__name__ == "LlamaForCausalLM"


def tokeniser(path, longest=16, **changed):
    """Of a small model whose words are w0 to w29, with entries of its tokenizer's configuration."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(30)} | {"[UNK]": 30}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model = transformers.BertModel(transformers.BertConfig(**{**SMALL, "max_position_embeddings": longest}))
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]")
    model.save_pretrained(path)
    own.save_pretrained(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return tokenising.Tokeniser(f"hf:{path}", tokenising.read_tokenizer(f"hf:{path}"), model)


def test_a_long_line_is_cut_before_it_is_tokenised(tmp_path, monkeypatch):
    made, seen = tokeniser(tmp_path / "words"), []
    own = made._tokenizer
    monkeypatch.setattr(
        made, "_tokenizer", lambda texts, **how: (seen.extend(map(len, texts)), own(texts, **how))[1]
    )
    made._tokenizer.pad_token, made._tokenizer.padding_side = "[UNK]", "right"
    text = "w1 " * 1_000_000
    found = made([text, "w2 w3"])
    assert found["input_ids"].tolist()[0] == [1] * 16
    assert max(seen) <= 32 * 16 + 10_000
    assert made.cut([text, "w2 w3"]) == 1


def test_what_a_tokenizer_cannot_do_is_told_in_a_line(tmp_path):
    with pytest.raises(InputError, match="its tokenizer cannot be used"):
        tokeniser(tmp_path / "words", model_max_length="x").cut(["w1 w2"])


def test_a_decoder_without_a_beginning_is_told_in_a_line(tmp_path):
    made = tokeniser(tmp_path / "words")
    made._config = type("Config", (), {"is_encoder_decoder": True})()
    with pytest.raises(InputError, match="lacks decoder_start_token_id"):
        made(["w1 w2"])
    made._config = type("Config", (), {"is_encoder_decoder": "x"})()
    assert set(made(["w1 w2"])) >= {"input_ids"}
