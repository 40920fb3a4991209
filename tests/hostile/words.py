"""Texts, rules, sweeps, selections, options and logs that nobody means."""

import random
from pathlib import Path

import numpy as np
import pandas as pd
from hostile.files import false_safetensors
from hostile.values import DIGITS, FULL, HF, TOPK, command, dumped, wild


def texts(folder: Path, draw: random.Random) -> list[str]:
    """Texts of one long line, of many, or of JSON that lies; labels of any kind."""
    size = draw.choice((1, 1000, 10**6, 2 * 10**7))
    piece = draw.choice(("a b the cat ", "the ", "x", "\u202e\x1b[2J ", "é ", "\x00", "\ud7ff", "日本 "))
    line = (piece * size)[:size]
    several = "\n" * min(size, 10**5), "the cat\n" * min(size, 3000), "\ufeffthe cat", ""
    text, name = draw.choice((line, f"{line}\nthe cat", *several)), draw.choice(("x.txt", "x.jsonl"))
    if name == "x.jsonl" and draw.random() < 0.7:
        row = {"text": draw.choice(("a b", line[: 10**6], wild(draw)))}
        row[draw.choice(("label", "target", "x"))] = wild(draw)
        text = "\n".join([dumped(row)] * draw.choice((1, 2, 50)))
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass") + draw.choice((b"", b"\xff\xfe", b"\x00")))
    how = ""
    if draw.random() < 0.3:
        label = draw.choice(("0", "9" * draw.choice(DIGITS), "-1", "1.5", "=1+1", "x" * 10**6, "\x1b[31m", ""))
        (folder / "labels").write_text(f"{label}\n" * draw.choice((1, 2, 3000)))
        how = " --labels labels"
    if draw.random() < 0.3:
        how += f" --max-length {draw.choice(('2', '1', '0', '-1', '9' * 30, '256', '257', 'x'))}"
    lines = f"""
        dispersion MODEL --inputs NAME --samples 2{how}
        look MODEL --inputs NAME{how}
        k-sweep MODEL --inputs NAME --rerun --k 2 --kinds topk,window --samples 2{how}
        compare MODEL MODEL --inputs NAME --samples 2{how}
        selections MODEL --inputs NAME{how}
    """
    return command(draw, lines, model=draw.choice((HF, HF, FULL)), name=name)


def rules(folder: Path, draw: random.Random) -> list[str]:
    """Rules of a check that nest, are long, or say other things than numbers."""
    n = draw.choice((1, 30, 900, 1001, 30_000))
    patterns = "[" * n, "[!" * (n // 2) + "]", "*a" * (n // 2) + "b", "\x1b[2J", "\u202e"
    chosen = [f"dispersion.p50 < 9 model={pattern}" for pattern in patterns]
    values = "9" * n, "nan", "0x9", "1_0", f"9 {'layer=0 ' * n}", f"9 layer={'9' * n}"
    chosen += [f"dispersion.p50 < {value}" for value in values]
    chosen += [
        f"{'x' * n} < 1",
        f"dispersion.p{n} > 1e{n}",
        f"dispersion.p50 {'<' * n} 9",
        f"{'(' * n}1 < 2",
        "=1",
    ]
    return command(draw, "check FULL --samples 4 --rule RULE", rule=draw.choice(chosen))


_NAMES = [
    *("width", "heads", "blocks", "length", "k", "mlp_width", "head_width", "train_samples", "holdout_samples"),
    *("epochs", "batch_size", "seed", "snapshots"),
]
_LONG = "9" * 18, "9" * 400, "[" * 60 + "]" * 60
_VALUES = ("100000", "-1", "0", "1e308", "nan", "true", '"x"', "[1]", "1.5", *_LONG)
_TASKS = '"parity"', '"listops"', '"text"', '"x"', '{ task = "listops", longest = 1000000 }'


def sweeps(folder: Path, draw: random.Random) -> list[str]:
    """Sweeps of impossible sizes, of too many runs, or of deep tables."""
    value = draw.choice(_VALUES)
    lines = [f"{draw.choice(_NAMES)} = {value}" if draw.random() < 0.7 else "epochs = 1", "[grid]"]
    lines.append(f"task = [{draw.choice(_TASKS)}]")
    for name in draw.sample(("seed", "width", "blocks", "k", "dropout", "attention", "learning_rate"), 3):
        entries = [
            draw.choice((value, str(at), '"topk"', f'{{ attention = "topk", k = {at} }}'))
            for at in range(draw.choice((1, 3, 400)))
        ]
        lines.append(f"{name} = [{', '.join(entries)}]")
    deep = "[" * draw.choice((100, 30_000)), "a." * 5000 + "b = 1", "x = " + "{a = " * 3000
    (folder / "x.toml").write_text(draw.choice(("\n".join(lines), "\n".join(lines), *deep)))
    return ["sweep", "x.toml", "--dry-run"]


def selections(folder: Path, draw: random.Random) -> list[str]:
    """Selections with numbers, shapes and types that no top-k has; alone, or two that do not belong together."""
    names = [_selection(folder, name, draw) for name in ("x", "y")[: draw.choice((1, 1, 2))]]
    layouts = "tokens,layers", "batch,sequence,heads,layers", "x", "tokens," * 5000, "tokens:layers"
    formats = "bf16", "fp8-e4m3", "float64", "x" * 10**5
    options = [["--layout", draw.choice(layouts)], ["--format", draw.choice(formats)]]
    return ["selections", *names, *draw.choice(([], ["--causal"], ["--json"], *options))]


def _selection(folder: Path, name: str, draw: random.Random) -> str:
    rows, n, k = draw.choice((0, 1, 3, 200)), draw.choice((1, 5, 64)), draw.choice((0, 1, 4, 70))
    dice = np.random.default_rng(draw.randrange(2**31))
    scores = dice.standard_normal((rows, n)).astype(draw.choice(["<f4", "<f2", "<f8", ">f4", "i4", "c8"]))
    scores *= draw.choice((1, 0))
    indices = dice.integers(0, n, (rows, k)).astype(draw.choice(["i8", "i2", "u8", "f4", "u1", "b1"]))
    if indices.size and draw.random() < 0.5:
        with np.errstate(all="ignore"):
            indices.flat[0] = np.array(draw.choice((-1, 2**31, 2**62, -(2**62)))).astype(indices.dtype)
    if rows and draw.random() < 0.5 and scores.dtype.kind == "f":
        scores.flat[: draw.choice((1, n))] = draw.choice((np.nan, np.inf, -np.inf, -0.0))
    found = {"indices": indices} if draw.random() < 0.2 else {"scores": scores, "indices": indices}
    if draw.random() < 0.6:
        numbers = np.full(rows, draw.choice((-1, 0, n, 2**40))), np.full(rows, np.nan)
        others = np.zeros((rows, k)), np.array(3), np.zeros(7), scores
        other = draw.choice(("lengths", "starts", "documents", "tokens", "weights", "routed_experts"))
        found[other] = draw.choice((*numbers, *others))
    path = folder / f"{name}.{draw.choice(('npz', 'safetensors', 'parquet'))}"
    if path.suffix == ".npz":
        np.savez(path, **found)
    elif path.suffix == ".safetensors":
        false_safetensors(path, draw, scores.tobytes() + indices.tobytes())
    else:
        written = {key: x for key, x in found.items() if x.dtype.kind != "c" and x.dtype.isnative}
        fitting = {key: x for key, x in written.items() if x.ndim and len(x) == rows}
        table = pd.DataFrame({key: list(x) for key, x in fitting.items()})
        table.astype({key: str for key in table if draw.random() < 0.1}).to_parquet(path)
    return path.name


def options(folder: Path, draw: random.Random) -> list[str]:
    """Options of look, compare, k-sweep and mask-stability with values that nobody means."""
    numbers = "0", "-1", "1", "12", "13", "9" * 18, "9" * 400, "1e3", "nan", "x", "\u0663", "1,2", "," * 5000
    marked = "</script><script>alert(1)</script>", "\x1b[31m<b>", "\u202ea b", "'; x", "--", "é"
    others = FULL, TOPK, HF, "hf:nothing", "x.pt", "..", "/dev/zero", "os:system", "json:loads", "a" * 5000
    pages = "x.html", "x.txt", "a/b/c.html", "..", "x" * 300 + ".html"
    names = {
        "number": draw.choice(numbers),
        "text": draw.choice(("a b", "", " ", "the " * 30_000, *marked)),
        "model": draw.choice((FULL, TOPK, HF)),
        "other": draw.choice(others),
        "page": draw.choice(pages),
        "kinds": draw.choice(("topk", "topk," * 1000, "block-16,window", "x")),
        "formats": draw.choice(("bf16", "bf16," * 1000, "fp8-e4m3", "x")),
    }
    lines = """
        look MODEL --text TEXT
        look MODEL --k NUMBER
        look HF --text TEXT --k NUMBER
        look FULL --out PAGE
        compare MODEL OTHER --top NUMBER --samples 2
        compare MODEL OTHER --samples 2
        k-sweep MODEL --k NUMBER --samples 2
        k-sweep FULL --max-k NUMBER --samples 2
        k-sweep FULL --rerun --k 2 --kinds KINDS --samples 2
        k-sweep FULL --rerun --k NUMBER --samples 2
        mask-stability TOPK --precision FORMATS --samples 2
        mask-stability TOPK --noise NUMBER --samples 2
        info OTHER
        dispersion OTHER
    """
    return command(draw, lines, **names)


def monitors(folder: Path, draw: random.Random) -> list[str]:
    """A monitor's table with long lines, numbers of many digits, formulas and control characters."""
    columns = ["step", "layer", "head", "max_logit", "entropy", "first_weight"]
    columns.append(draw.choice(("module", "=1+1", "\x1b[2J", "x" * 10**6)))
    numbers = "0", "1", "9" * draw.choice(DIGITS), "nan", "inf", "1e400", ""
    cells = (*numbers, "=cmd|' /C calc'!A0", "\x1b[31m", '"', "x" * 10**5, "\u202e")
    lines = [",".join(columns)]
    for _ in range(draw.choice((0, 1, 20))):
        lines.append(",".join(draw.choice(cells) for _ in range(draw.choice((1, 7, 7, 7, 5000)))))
    name = draw.choice(("m-heads.csv", "m.csv"))
    (folder / name).write_bytes("\n".join(lines).encode() + draw.choice((b"", b"\n", b"\xff", b"\x00")))
    return command(draw, "monitor NAME\nmonitor NAME --out m.png\nmonitor NAME --out m.x", name=name)
