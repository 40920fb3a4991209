"""How often do the routers of a trained mixture of experts choose otherwise when only the rounding changes?

    apt-get download bible-kjv bible-kjv-text    # the King James Bible, and what unpacks it; neither is installed
    for file in bible-kjv*.deb; do dpkg -x "$file" kjv; done
    kjv/usr/bin/bible -p kjv/usr/lib -l100000 Gen1:1-Rev22:21 > bible.txt
    python experiments/router_disagreement.py train bible.txt moe      # minutes on one core
    python experiments/router_disagreement.py compare moe

``train`` makes a Mixtral of 4 layers, 8 experts of which each token takes 2, and 1.9 million parameters, on the
bytes of a text; the last twentieth is held out. ``compare`` runs it on 8,192 held-out bytes, in several ways that
are the same in exact arithmetic, and compares what its routers choose, as ``semdiag selections MODEL --save`` and
``semdiag selections A B`` do.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semdiag.capturing.batches import split
from semdiag.capturing.loading import load
from semdiag.mathematics.rounding import number_format
from semdiag.measuring.measure import DTYPES
from semdiag.questions.selections.answer import comparison_summary, own_summary
from semdiag.selections.compare import compare_files
from semdiag.selections.files import read_selections
from semdiag.selections.own import Saving, own_selections

LENGTH, BATCH, STEPS, WARM, RATE = 128, 16, 1500, 100, 2e-3
HELD_OUT, TESTED = 20, 64  # one part in so many; sequences
# How each run attends, samples in a batch, threads, precision. The others are compared with the first.
RUNS = {
    "reference": ("eager", 32, 1, "float32"),
    "the same again": ("eager", 32, 1, "float32"),
    "2 threads": ("eager", 32, 2, "float32"),
    "batches of 5": ("eager", 5, 1, "float32"),
    "sdpa": ("sdpa", 32, 1, "float32"),
    "bfloat16 throughout": ("eager", 32, 1, "bfloat16"),
}


def train(text: Path, folder: Path) -> None:
    """Train the mixture and write it, and held-out bytes, into a folder."""
    from transformers import MixtralConfig, MixtralForCausalLM

    data = torch.from_numpy(np.frombuffer(text.read_bytes(), np.uint8).astype(np.int64))
    data, held_out = data[: -len(data) // HELD_OUT], data[-len(data) // HELD_OUT :]
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=2 * LENGTH,
        router_aux_loss_coef=0.02, output_router_logits=True, attn_implementation="sdpa",
    )  # fmt: skip
    model = MixtralForCausalLM(config).train()
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    optimiser = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        fall = 0.5 * (1 + math.cos(math.pi * max(0, step - WARM) / (STEPS - WARM)))
        optimiser.param_groups[0]["lr"] = RATE * min((step + 1) / WARM, 0.1 + 0.9 * fall)
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=draw)
        ids = torch.stack([data[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    tested = held_out[: TESTED * LENGTH].view(TESTED, LENGTH)
    model.eval()
    model.config.output_router_logits = False
    with torch.no_grad():
        loss = model(input_ids=tested, labels=tested).loss.item()
    print(f"held out: {loss:.3f} nats a byte")
    model.save_pretrained(folder)
    np.save(folder / "held-out.npy", tested.numpy())


def compare(folder: Path) -> None:
    """Run the mixture in each way, and print how many tokens choose otherwise, layer by layer."""
    print(f"{'':22}{'tokens whose experts differ, by layer':46}numeric    bug  own top-k")
    with tempfile.TemporaryDirectory() as held:
        for name, (attention, batch, threads, dtype) in RUNS.items():
            found = run(folder, attention, batch, threads, dtype, Path(held, f"{name}.npz"))
            if name == "reference":
                certified = [row["certified_share"] for row in found["selections"]]
                continue
            files = [read_selections(Path(held, f"{one}.npz")) for one in ("reference", name)]
            compared = compare_files(*files, dtype, ("", ""))
            (entry,) = comparison_summary(compared, "reference", name, {}, {})["results"]
            classes = entry["classes"]
            by_layer = shares([row["changed"] / row["rows"] for row in entry["layers"]])
            print(f"{name:22}{by_layer:46}{classes['numeric']:7,}{classes['bug']:7,}{entry['by_own_scores']:11,}")
        print(f"{'certified (bfloat16)':22}{shares(certified)}")


def shares(values: list[float]) -> str:
    """Shares in percent."""
    return "  ".join(f"{100 * value:6.2f}%" for value in values)


def run(folder: Path, attention: str, batch: int, threads: int, dtype: str, target: Path) -> dict[str, Any]:
    """Write what the mixture chooses, as ``semdiag selections --save``, and return what is found."""
    loaded, before = load(f"hf:{folder}"), torch.get_num_threads()
    loaded.module.set_attn_implementation(attention)
    ids = torch.from_numpy(np.load(folder / "held-out.npy"))
    saving, kind = Saving(target), number_format("bfloat16")
    torch.set_num_threads(threads)
    try:
        found = own_selections(loaded, split(ids, batch), kind, torch.device("cpu"), DTYPES[dtype], saving)
    finally:
        torch.set_num_threads(before)
    saving.write()
    return dict(own_summary(found, str(folder), kind.name, {})["results"][0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_subparsers(dest="asked", required=True)
    trains = asked.add_parser("train")
    trains.add_argument("text", type=Path)
    trains.add_argument("folder", type=Path)
    asked.add_parser("compare").add_argument("folder", type=Path)
    given = parser.parse_args()
    train(given.text, given.folder) if given.asked == "train" else compare(given.folder)
