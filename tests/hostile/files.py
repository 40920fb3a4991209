"""Files that lie: pickles, tensors, arrays, Hugging Face models and records."""

import io
import json
import pickletools
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from hostile.values import DIGITS, FULL, SIZES, Raw, command, dumped, wild, write_json

_ON_INPUTS = """
    dispersion FULL --inputs NAME
    dispersion HF --inputs NAME
    look HF --inputs NAME
    look TOPK --inputs NAME
    compare HF --dtype-b bfloat16 --inputs NAME
    compare FULL FULL --inputs NAME
    k-sweep HF --inputs NAME
    k-sweep HF --rerun --k 2 --kinds topk --inputs NAME
    mask-stability TOPK --precision bf16 --inputs NAME
    selections HF --inputs NAME
"""


def pickles(folder: Path, draw: random.Random) -> list[str]:
    """A .pt whose pickle has long or many names, deep containers, or numbers of many digits."""
    long = draw.choice((10, 1000, 20_000, 100_000, 400_000))
    name = (draw.choice(("a", "os", ".", "torch._utils", "é", "\x1b[2J", "a.")) * long)[:long].encode()
    called = b"c" + name + b"\n" + draw.choice((b"system", name)) + b"\n"
    number = b"I" + b"9" * draw.choice(DIGITS) + b"\n"
    size = struct.pack("<i", draw.choice((10, 2**20, 2**31 - 1)))
    big = b"\x8b" + size + b"\xff" * draw.choice((10, 2**20))
    deep = draw.choice((10, 100, 5000, 200_000))
    named = called, called * draw.choice((1, 20)), called + b")R", b"\x93" * 3
    nested = b"]" * deep, b"(" * deep + b"t" * deep, b"]" + b"2" * deep + b"a" * (deep // 2)
    doubled = b"]q\x00" + b"(h\x00h\x00e" * min(deep, 60)
    others = b"}U\x01aU\x01a" + number + b"s", number, big, doubled, b"X" + struct.pack("<I", 2**32 - 1) + b"x"
    content = b"\x80\x02" + draw.choice((*named, *nested, *others)) + b"."
    if draw.random() < 0.2:
        (folder / "x.pt").write_bytes(content)
    else:
        with zipfile.ZipFile(
            folder / "x.pt", "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        ) as archive:
            archive.writestr("x/data.pkl", content)
            archive.writestr("x/version", draw.choice((b"3\n", b"9" * 5000, b"")))
            archive.writestr("x/data/0", bytes(64))
    return command(draw, "info x.pt\ncheck x.pt\ndispersion FULL --inputs x.pt\nlook HF --inputs x.pt")


def storages(folder: Path, draw: random.Random) -> list[str]:
    """A .pt with a tensor whose shape, strides or storage are not what is stored."""
    file = io.BytesIO()
    torch.save({"tokens": torch.zeros(2, 12, dtype=torch.int64)}, file)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(n for n in members if n.endswith("data.pkl"))
    small = [
        at for op, arg, at in pickletools.genops(members[name]) if op.name == "BININT1" and arg in (1, 2, 12, 24)
    ]
    content = bytearray(members[name])
    for at in sorted(draw.sample(small, draw.randrange(1, len(small) + 1)), reverse=True):
        content[at : at + 2] = b"J" + struct.pack("<i", draw.choice((0, 1, 2**31 - 1, -1, 2**20, 2**16)))
    members[name] = bytes(content)
    with zipfile.ZipFile(folder / "x.pt", "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return command(draw, _ON_INPUTS, name="x.pt")


def tensors(folder: Path, draw: random.Random) -> list[str]:
    """A .pt with tensors of other layouts, types and shapes, or under other names."""
    ids = torch.randint(3, (2, 12), generator=torch.Generator().manual_seed(draw.randrange(99)))
    floats, rows = ids.float(), [ids[0].float(), ids[1, :3].float()]
    layouts = ids.to_sparse(), floats.to_sparse_csr(), torch.zeros(2, 12, device="meta"), ids.T
    nested = torch.nested.nested_tensor(rows), torch.nested.nested_tensor(rows, layout=torch.jagged)
    kinds = ids.to(torch.uint16), ids.to(torch.complex64), ids.half(), ids.to(torch.float8_e4m3fn), ids.bool()
    other_kinds = torch.quantize_per_tensor(floats, 1.0, 0, torch.quint8), ids.to(torch.complex64).conj()
    shown = (
        ids[:1].expand(2**31, 12),
        torch.zeros(1, dtype=torch.int64).expand(2**40),
        ids[:1, :1].expand(1, 200_000),
    )
    shapes = (
        torch.tensor(3),
        torch.zeros(0, 12).long(),
        torch.zeros(2, 0).long(),
        ids[None],
        ids[:, :1],
        ids.flatten(),
    )
    values = ids - 5, ids + 2**40, torch.full((2, 12), torch.nan), torch.nn.Parameter(floats)
    x = draw.choice((*layouts, *nested, *kinds, *other_kinds, *shown, *shapes, *values))
    other = draw.choice((None, 1, "text", 10**5000, [ids], {"a": x}, b"x", 2.5, True))
    alone = x, {"tokens": x}, {"input_ids": x}, (x,), {7: x}, [[x]], {"inputs_embeds": x}, [], {}, other
    names = "attention_mask", "labels", "position_ids", "k" * draw.choice((10, 5000))
    content = draw.choice(
        (*alone, [x, ids], [ids, x], {"input_ids": ids, "x": other}, *({"input_ids": ids, n: x} for n in names))
    )
    torch.save(content, folder / "x.pt")
    return command(draw, _ON_INPUTS, name="x.pt")


def arrays(folder: Path, draw: random.Random) -> list[str]:
    """A .npy or .npz with a header that lies, or that unpacks to gigabytes."""
    dtype = draw.choice(["<i8", "|u1", ">i4", "<f8", "|O", "|V100000000", "<U1000000", "<M8[s]", "|b1"])
    shapes = "(2, 12)", "(2**40, 12)", "(9999999999999, 9)", "(-1, 12)", "()", "(0, 5)", "(2,)" * 1000, "(True, 2)"
    order = draw.choice((True, False, 7))
    header = f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {draw.choice(shapes)}, }}"
    header += " " * draw.choice((0, 100, 2**16)) + draw.choice(("", "[" * 5000, "#"))
    whole = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header) + 1) + header.encode() + b"\n" + bytes(192)
    kind = draw.randrange(4)
    if kind == 0:
        (folder / "x.npy").write_bytes(whole)
        return command(draw, _ON_INPUTS, name="x.npy")
    if kind == 1:
        (folder / "x.npz").write_bytes((folder.parent / "bomb.npz").read_bytes())
        return command(draw, _ON_INPUTS, name="x.npz")
    with zipfile.ZipFile(folder / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(draw.choice(("tokens.npy", "scores.npy", "x" * 60_000 + ".npy", "../x.npy")), whole)
        for at in range(draw.choice((0, 1, 3000))):
            archive.writestr(f"a{at}.npy", b"")
    return command(draw, _ON_INPUTS, name="x.npz")


_FIELDS = [
    *("vocab_size", "num_labels", "max_position_embeddings", "num_key_value_heads", "head_dim", "rope_parameters"),
    *("is_encoder_decoder", "architectures", "model_type", "dtype", "quantization_config", "tie_word_embeddings"),
    *("auto_map", "id2label", "hidden_act", "pad_token_id", "text_config", "sliding_window", "layer_types"),
    *("num_experts", "problem_type", "_attn_implementation", "rms_norm_eps", "transformers_version", "decoder"),
]
_KINDS = ("bert", "gpt2", "t5", "vit", "mixtral")
_FITTING: dict[str, tuple[Any, ...]] = {
    "model_type": (*_KINDS, "x" * 100_000, "../../x"),
    "architectures": (["BertModel"], ["X" * 10**5], ["os.system"]),
    "dtype": ("bfloat16", "float8_e4m3fn", "int8", "x"),
    "quantization_config": ({"quant_method": "gptq"}, {"load_in_8bit": True}),
    "rope_parameters": ({"rope_type": "yarn", "factor": 1e300}, {"rope_theta": 0.0}),
}


def sizes(folder: Path, draw: random.Random) -> list[str]:
    """A Hugging Face model whose configuration says other sizes, types and classes than its weights."""
    here = folder / "hf"
    here.mkdir()
    for file in (folder.parent / "hf").iterdir():
        (here / file.name).write_bytes(file.read_bytes())
    config = json.loads((here / "config.json").read_text())
    for name in draw.sample([*SIZES, *_FIELDS], draw.choice((1, 1, 1, 2, 3))):
        fits = name in _FITTING and draw.random() < 0.5
        config[name] = draw.choice(_FITTING[name]) if fits else wild(draw)
    write_json(here / "config.json", {"model_type": draw.choice(_KINDS)} if draw.random() < 0.2 else config)
    if draw.random() < 0.2:
        false_safetensors(here / "model.safetensors", draw)
    if draw.random() < 0.2:
        name = draw.choice(("tokenizer_config.json", "tokenizer.json"))
        content = json.loads((here / name).read_text())
        content[draw.choice([*content, "model_max_length", "truncation", "padding", "chat_template"])] = wild(draw)
        write_json(here / name, content)
    np.save(folder / "x.npy", np.arange(10).reshape(2, 5))
    (folder / "x.txt").write_text("the cat\na b c d\n")
    lines = """
        info hf:hf
        dispersion hf:hf --inputs NAME
        look hf:hf --text TEXT
        compare HF hf:hf --inputs NAME
        k-sweep hf:hf --inputs NAME
        selections hf:hf --inputs NAME
        check hf:hf --inputs NAME --rule RULE
    """
    names = {"name": draw.choice(("x.npy", "x.txt")), "text": "a b the cat", "rule": "dispersion.p50 < 9"}
    return command(draw, lines, **names)


def false_safetensors(path: Path, draw: random.Random, content: bytes = bytes(96)) -> None:
    """Write safetensors whose header lies."""
    many, long = Raw(f"[{'9' * 400}]"), Raw(f"[{'3, ' * 9999}3]")
    shape = draw.choice(([3, 4], [2**40, 4], [10**18] * 8, [-1, 4], [], [0], many, "x", long))
    where = draw.choice(([0, 96], [0, 2**62], [96, 0], [-8, 8], [0], many))
    one = {"dtype": draw.choice(("F32", "I64", "F8_E4M3", "X", None)), "shape": shape, "data_offsets": where}
    names = draw.choice((["indices"], ["scores", "indices"], ["model.norm.weight"], [*map(str, range(500))]))
    header = dumped(dict.fromkeys(names, one))
    size = draw.choice((len(header), len(header), 2**63, 2**40, 0))
    path.write_bytes(struct.pack("<Q", size) + header.encode() + content)


def records(folder: Path, draw: random.Random) -> list[str]:
    """JSON of a baseline, a configuration, a budget, a run's record or measurements, with a wild value."""
    kind = draw.choice(("baseline", "budget", "config", "measurements", "run"))
    if kind == "budget":
        layer = {"layer": 0, "module": "a", "occurrence": 0, "k": [2]}
        layer[draw.choice(("k", "module", "occurrence"))] = wild(draw)
        loss = {"block": draw.choice((1, wild(draw))), "layers": draw.choice(([layer], wild(draw)))}
        default = draw.choice(("loss", wild(draw)))
        budget = {"schema": "semdiag.budget/1", "default": default, "budgets": {"loss": loss}}
        write_json(folder / "x.json", budget)
        return ["budget", "x.json"]
    if kind == "config":
        config = {"mask_type": "windowed", "mask_size": 5, "n_heads": 1}
        write_json(folder / "x.json", config | {draw.choice((*config, "x")): wild(draw)})
        return command(draw, "info ../full --config x.json\ninfo FULL --config x.json")
    if kind == "measurements":
        pd.DataFrame({"model": ["a"]}).to_parquet(folder / "models.parquet")
        write_json(folder / "provenance.json", {"schema": wild(draw), "samples": wild(draw)})
        return draw.choice((["measurements", "."], command(draw, "report --from .")))
    if kind == "run":
        (folder / "run").mkdir()
        (folder / "run" / "last.pt").write_bytes((folder / FULL).read_bytes())
        for name in ("run.json", "record.json", "manifest.json"):
            write_json(folder / "run" / name, {"sha256": wild(draw), "runs": wild(draw), "epochs": wild(draw)})
        write_json(folder / "manifest.json", wild(draw))
        return command(draw, "info run\nconvergence run\ndispersion run")
    numbers = {name: wild(draw) for name in draw.sample(("p50", "p75", "p90", "p95", "p100"), 2)}
    model = {"model": "m", "dispersion": numbers, "accuracy": wild(draw)}
    schema = draw.choice(("semdiag.check/1", "semdiag.check/2", wild(draw)))
    baseline = {"schema": schema, "models": draw.choice(([model], wild(draw)))}
    write_json(folder / "x.json", draw.choice((baseline, baseline, wild(draw))))
    how = draw.choice(("", " --tolerance nan", " --tolerance 1e400", " --tolerance -1", " --tolerance 0"))
    return command(draw, f"check FULL --samples 4 --baseline x.json{how}")
