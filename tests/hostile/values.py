"""What hostile inputs are made of: values that no field expects, commands, and good models beside them."""

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

HUGE = (
    *(2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64, 10**18, 10**400, -1, 0, -(2**63), 1e300, 1.5),
    *("x", None, True, [], {}),
)
DIGITS = (50, 400, 4300, 5000, 100_000)
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
FULL, TOPK, HF = "../full/last.pt", "../topk/last.pt", "hf:../hf"
BASE_OF = {"Bert", "GPT2", "T5", "ViT", "Mixtral"}  # classes that configurations name


class Raw:
    """Text that stands in JSON as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def prepare(folder: Path) -> None:
    """Write two small runs, a language model with a tokenizer, and an array that unpacks to more than 1 GiB."""
    import tokenizers
    import torch
    import transformers

    from semdiag_models import ModelConfig, TrainingConfig, open_run, train_run

    sizes = {"vocabulary_size": 3, "classes": 2, "length": 12, "blocks": 1, "heads": 1}
    for name, own in (("full", {}), ("topk", {"attention": "topk", "k": 3})):
        config = ModelConfig(**sizes, width=8, mlp_width=8, head_width=8, **own)
        training = TrainingConfig("even-pairs", 12, 1, 7, 20, 10)
        run = open_run(folder / name, config, training, torch.device("cpu"), resume=False, overwrite=False)
        train_run(folder / name, run, {})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **SIZES))
    model.save_pretrained(folder / "hf")
    words = {word: at for at, word in enumerate(["<unk>", "<pad>", *"abcdefghijklmnopqrstuvwxyz", "the", "cat"])}
    tokeniser = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    tokeniser.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokeniser, unk_token="<unk>", pad_token="<pad>")
    fast.save_pretrained(folder / "hf")
    packed = zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with packed, packed.open("tokens.npy", "w", force_zip64=True) as member:
        facts = {"descr": "<i8", "fortran_order": False, "shape": (12_000_000, 12)}
        np.lib.format.write_array_header_1_0(member, facts)
        for _ in range(1200):
            member.write(bytes(960_000))
    for kind in BASE_OF:  # imported before the forks
        getattr(transformers, f"{kind}Model")


def dumped(value: Any) -> str:
    """JSON, with raw texts in their places, and whole numbers of any length."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {dumped(x)}" for name, x in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(dumped, value))}]"
    return f"1{'0' * 400}" if value == 10**400 else json.dumps(value)


def wild(draw: random.Random) -> Any:
    """A value that no field expects."""
    depth, digits = draw.choice((10, 49, 51, 2000, 30_000)), draw.choice(DIGITS)
    numbers = Raw("9" * digits), Raw(f"-{'9' * digits}"), Raw(f"1e{digits}"), Raw("NaN"), Raw("-Infinity")
    deep = Raw("[" * depth + "]" * depth), Raw('{"a":' * depth + "1" + "}" * depth)
    others = "\x1b[31m\u202e\ud7ff", "9" * digits, "=1+1", ["x"] * 1000, {str(at): at for at in range(1000)}
    return draw.choice((draw.choice(HUGE), *numbers, *deep, *others))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, surrogates included."""
    path.write_text(dumped(value), encoding="utf-8", errors="surrogatepass")


def command(draw: random.Random, lines: str, **names: str) -> list[str]:
    """One of several command lines as words; names in capitals stand for words."""
    known = {"FULL": FULL, "TOPK": TOPK, "HF": HF} | {name.upper(): value for name, value in names.items()}
    words = draw.choice(lines.strip().splitlines()).split()
    short, none = ["--quiet"], []
    how = {"look": short, "check": short, "selections": none, "info": none, "monitor": none}
    quiet = how.get(words[0], ["--figures", "none", "--quiet"])
    return [known.get(word, word) for word in words] + quiet
