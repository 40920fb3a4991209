"""In a command every model is opened, read and hashed once, and its tokenizer is made once."""

import os
import shutil
import warnings
from collections import Counter

import pytest
import torch

from semdiag.capturing import pretrained
from semdiag_files import files
from semdiag_models import checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def pretrained_models(here):
    """Two masked-language models and a mixture of experts, each with its tokenizer; and texts."""
    bert = transformers.BertConfig(intermediate_size=16, **SIZES)
    mixture = transformers.MixtralConfig(intermediate_size=16, num_key_value_heads=2, **SIZES)
    kinds = {"masked": (transformers.BertForMaskedLM, bert), "second": (transformers.BertForMaskedLM, bert)}
    kinds["mixture"] = transformers.MixtralForCausalLM, mixture
    (here / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    for name, (kind, config) in kinds.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            kind(config).save_pretrained(here / name)
        transformers.BertTokenizer(str(here / "vocab.txt")).save_pretrained(here / name)
    (here / "texts.txt").write_text("a b c d e f\ng h i j\n", encoding="utf-8")


@pytest.fixture
def counts(monkeypatch):
    """How often each thing was done since the fixture was asked for, by what was done and the file's name."""
    found = Counter()

    def count(owner, name, what, of):
        own = getattr(owner, name)

        def counting(*given, **options):
            if (named := of(given)) is not None:
                found[what, named] += 1
            return own(*given, **options)

        monkeypatch.setattr(owner, name, counting)

    def checkpoint_name(given):
        path = os.fspath(given[0])
        return "/".join(path.split("/")[-2:]) if path.endswith(".pt") else None

    count(transformers.AutoTokenizer, "from_pretrained", "tokenizer", lambda given: given[0].name)
    count(pretrained, "check_sizes", "model", lambda given: given[0])
    count(pretrained, "_sha256", "hash", lambda given: given[0][0].parent.name)
    count(files.os, "open", "open", checkpoint_name)
    count(checkpoint.torch, "load", "read", lambda given: "any")
    count(checkpoint.hashlib, "file_digest", "file hash", lambda given: "any")
    return found


@pytest.mark.parametrize(
    ("words", "models"),
    [
        ("dispersion hf:masked", ("masked",)),
        ("k-sweep hf:masked --rerun --k 2", ("masked",)),
        ("look hf:masked", ("masked",)),
        ("selections hf:mixture", ("mixture",)),
        ("compare hf:masked hf:second", ("masked", "second")),
        pytest.param("report hf:masked", ("masked",), marks=pytest.mark.slow),
    ],
)
def test_a_pretrained_model_and_its_tokenizer_are_read_once(run_semdiag, pretrained_models, counts, words, models):
    without = [] if words.startswith(("look", "selections")) else ["--figures", "none"]
    outcome = run_semdiag(*words.split(), "--inputs", "texts.txt", *without)
    assert outcome.code == 0, outcome.err
    expected = Counter({("tokenizer", name): 1 for name in models})
    expected += Counter({("model", f"hf:{name}"): 1 for name in models} | {("hash", name): 1 for name in models})
    assert counts == expected


@pytest.mark.parametrize(
    "words",
    ["dispersion run", "look run", "info run", "k-sweep run --rerun --k 2", "convergence run"],
)  # fmt: skip
def test_a_checkpoint_is_opened_read_and_hashed_once(run_semdiag, tiny_runs, here, counts, words):
    shutil.copytree(tiny_runs.full, here / "run")
    without = [] if words.startswith(("look", "info")) else ["--figures", "none"]
    outcome = run_semdiag(*words.split(), *without)
    assert outcome.code == 0, outcome.err
    assert counts == Counter({("open", "run/last.pt"): 1, ("read", "any"): 1, ("file hash", "any"): 1})
