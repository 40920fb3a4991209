"""Forecast against measurement: which choices of routers and indexers change where a model runs in another format.

The method was mended on the tiny models of MADE_ON. Those of HELD_OUT were chosen before any of them was run.

    python benchmarks/selection_forecast.py held-out --mixture FOLDER    # of experiments/router_disagreement.py

Goal, of all selections together: within one percentage point where at least 5% change, within a factor of 2 below.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from mask_forecast import reached

from semdiag.capturing.loading import LoadedModel, load
from semdiag.mathematics.selections.number_formats import number_format
from semdiag.measuring.findings.changed_shares import changed_shares
from semdiag.questions.selections.measure.propagated import propagated_selections

FORMATS = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_EXPERTS = {"n_routed_experts": 16, "n_shared_experts": 1}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 16}
_INDEXED = {
    **_LATENT,
    **_EXPERTS,
    **_INDEXER,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 8,
}
_RATES = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
_BLOCKS = {
    **_EXPERTS, **_INDEXER, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 8,
    "o_groups": 2, "index_topk": 4, "sliding_window": 8, "partial_rotary_factor": 0.5, "compress_rates": _RATES,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 16},
    "Qwen3Moe": {"num_experts": 16, "head_dim": 16},
    "DeepseekV3": {**_LATENT, **_EXPERTS, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "GptOss": {"num_local_experts": 16, "head_dim": 16, "sliding_window": 16},
    "DeepseekV32": _INDEXED,
    "GlmMoeDsa": _INDEXED,
    "DeepseekV4": _BLOCKS,
    "Olmoe": {"num_experts": 16},
    "Glm4Moe": {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16},
}
Made = tuple[int, int, float, int]  # layers, width, scale of the weights, and the seed of a random model
MADE_ON = dict.fromkeys(list(FAMILIES)[:7], (2, 32, 0.5, 3))
HELD_OUT = dict.fromkeys(FAMILIES, (6, 64, 1.5, 11))
SAMPLES, LENGTH = 64, 48


def random_model(family: str, layers: int, width: int, scale: float, seed: int) -> LoadedModel:
    """A model of random weights."""
    import transformers

    sizes = {
        "vocab_size": 512, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4,
        "hidden_size": width, "intermediate_size": 2 * width, "moe_intermediate_size": width,
        "num_experts_per_tok": 4, "max_position_embeddings": 128,
    }  # fmt: skip
    sizes_of_family = dict(FAMILIES[family])
    if family == "DeepseekV4":
        kinds = ["sliding_attention"] + ["compressed_sparse_attention"] * (layers - 1)
        sizes_of_family |= {"mlp_layer_types": ["moe"] * layers, "layer_types": kinds}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **sizes_of_family})
    module = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, values in (*module.named_parameters(), *module.named_buffers()):
            if name.endswith(("router.bias", "correction_bias")):
                values.normal_(0, 0.1)
            elif values.ndim > 1:
                values.normal_(0, scale * values.shape[-1] ** -0.5)
    return LoadedModel(family, "", module, "hugging face", "unknown")


def rows_of(name: str, made: Made | None, mixture: Path | None) -> Iterator[dict[str, object]]:
    """A row for each format: all selections together, and how many single ones reach the goal."""
    if made is None:
        loaded = load(f"hf:{mixture}")
        batches = torch.from_numpy(np.load(mixture / "held-out.npy")).split(32)
    else:
        loaded = random_model(name, *made)
        batches = torch.randint(512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1)).split(8)
    for format in FORMATS:
        start, kind = time.process_time(), number_format(format)
        try:
            counts = propagated_selections(loaded, list(batches), kind, torch.device("cpu"))
        except (ValueError, RuntimeError) as error:
            print(f"{name}, {kind.name}: {error}", flush=True)
            continue
        row = changed_shares(counts)
        each = [changed_shares(own) for _, own in counts.groupby(["module", "number"], sort=False)]
        inside = [own["forecast_low"] <= own["measured"] <= own["forecast_high"] for own in each]
        yield {
            "model": name,
            "format": kind.name,
            "rows": row["queries"],
            "forecast": f"{row['forecast']:.2%}",
            "interval": f"{row['forecast_low']:.2%} to {row['forecast_high']:.2%}",
            "measured": f"{row['measured']:.2%}",
            "goal": "reached" if reached(row["forecast"], row["measured"]) else "missed",
            "selections": f"{sum(reached(own['forecast'], own['measured']) for own in each)} of {len(each)}",
            "in interval": f"{sum(inside)} of {len(inside)}",
            "seconds": round(time.process_time() - start),
        }


def main() -> None:
    """Print a table of the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["made-on", "held-out"])
    parser.add_argument("--mixture", type=Path)
    parser.add_argument("--only", help="one of the models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {**(MADE_ON if options.which == "made-on" else HELD_OUT)}
    if options.which == "held-out" and options.mixture:
        models["mixture"] = None
    rows = []
    for name, made in models.items():
        if options.only in (None, name):
            of_model = list(rows_of(name, made, options.mixture))
            print(pd.DataFrame(of_model).to_string(index=False), flush=True)
            rows += of_model
    print(f"goal reached: {sum(row['goal'] == 'reached' for row in rows)} of {len(rows)} pairs")


if __name__ == "__main__":
    main()
