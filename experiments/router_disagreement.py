"""How often do the routers of a trained mixture of experts choose otherwise when only the rounding changes?

    apt-get download bible-kjv bible-kjv-text    # the King James Bible, and what unpacks it; neither is installed
    for file in bible-kjv*.deb; do dpkg -x "$file" kjv; done
    kjv/usr/bin/bible -p kjv/usr/lib -l100000 Gen1:1-Rev22:21 > bible.txt
    python experiments/router_disagreement.py train bible.txt moe      # minutes on one core
    python experiments/router_disagreement.py compare moe

``train`` makes a Mixtral of 4 layers, 8 experts of which each token takes 2, and 1.9 million parameters, on the
bytes of a text; the last twentieth is held out. ``compare`` runs it on 8,192 held-out bytes, in several ways that
are the same in exact arithmetic, and compares what its routers choose: ``semdiag selections MODEL --save``, then
``semdiag selections A B``.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

LENGTH, BATCH, STEPS, WARM, RATE = 128, 16, 1500, 100, 2e-3
HELD_OUT, TESTED = 20, 64  # one part in so many; sequences
# The reference is the first: one thread, batches of 32, eager attention, float32.
RUNS = {
    "reference": ("eager", ("--batch-size", "32"), 1, "float32"),
    "the same again": ("eager", ("--batch-size", "32"), 1, "float32"),
    "2 threads": ("eager", ("--batch-size", "32"), 2, "float32"),
    "batches of 5": ("eager", ("--batch-size", "5"), 1, "float32"),
    "sdpa": ("sdpa", ("--batch-size", "32"), 1, "float32"),
    "bfloat16 throughout": ("eager", ("--batch-size", "32", "--dtype", "bfloat16"), 1, "bfloat16"),
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
    with tempfile.TemporaryDirectory() as held:
        files, certified = {}, ""
        for name, (attention, options, threads, _) in RUNS.items():
            model = Path(held, attention)
            if not model.exists():
                model.mkdir()
                for file in folder.glob("*.safetensors"):
                    (model / file.name).symlink_to(file.resolve())
                config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                (model / "config.json").write_text(json.dumps(config | {"attn_implementation": attention}))
            files[name] = Path(held, f"{name}.npz")
            words = (f"hf:{model}", "--inputs", str(folder / "held-out.npy"), "--save", str(files[name]), *options)
            found = semdiag(*words, threads=threads)["selections"]
            if name == "reference":
                certified = "  ".join(f"{100 * row['certified_share']:5.1f} %" for row in found)
        print(f"{'':22}{'share of tokens whose experts differ, by layer':40}numeric  bug")
        for name, (*_, format) in RUNS.items():
            if name != "reference":
                found = semdiag(str(files["reference"]), str(files[name]), "--format", format)
                differ = "  ".join(f"{100 * row['changed'] / row['rows']:5.2f} %" for row in found["layers"])
                classes = found["classes"]
                print(f"{name:22}{differ:40}{classes['numeric']:7,}  {classes['bug']:,}")
        print(f"{'certified (bfloat16)':22}{certified}")


def semdiag(*words: str, threads: int = 1) -> dict[str, Any]:
    """Run the command and return its one result."""
    command = shutil.which("semdiag") or sys.exit("semdiag is not installed here.")
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [command, "selections", *words, "--json", "--quiet"], env=environment, capture_output=True, check=False
    )
    if done.returncode not in (0, 1):
        sys.exit(done.stderr.decode())
    (found,) = json.loads(done.stdout)["results"]
    return dict(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_subparsers(dest="asked", required=True)
    trains = asked.add_parser("train")
    trains.add_argument("text", type=Path)
    trains.add_argument("folder", type=Path)
    asked.add_parser("compare").add_argument("folder", type=Path)
    given = parser.parse_args()
    train(given.text, given.folder) if given.asked == "train" else compare(given.folder)
