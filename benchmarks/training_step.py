"""Time of one training step, as a ratio to a textbook transformer on torch's own attention.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/training_step.py --threads 2

The textbook model is the same architecture with separate q, k, v projections, ``torch.nn.Dropout``, and
``scaled_dot_product_attention`` with a boolean mask (top-k: scores, ``topk``, scatter into the mask). Steps of
both models alternate, so both see the same load of the machine. Memory is the peak of resident memory of a
process of its own that does three steps. The last table says where the steps of this project's model spend their
time; ``--where`` prints it alone.
"""

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models import Encoder, ModelConfig


class TextbookBlock(nn.Module):
    """Pre-norm block as a textbook writes it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, d = config, config.width
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(d, elementwise_affine=False) for _ in range(2))
        p = config.dropout
        self.mlp = nn.Sequential(
            nn.Linear(d, config.mlp_width), nn.Dropout(p), nn.ReLU(), nn.Linear(config.mlp_width, d), nn.Dropout(p)
        )
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (f(normed)[:, None] for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, self.mask(q, k), self.config.dropout)
        x = x + self.drop(self.out(mixed[:, 0]))
        return x + self.mlp(self.mlp_norm(x))

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """The boolean mask (B, 1, L, L)."""
        scores = q @ k.transpose(2, 3)
        if self.config.k is None:
            return torch.ones_like(scores, dtype=torch.bool)
        best = scores.topk(self.config.k, -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


class Textbook(nn.Module):
    """Embedding, blocks, mean pooling, head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.register_buffer("positions", Encoder(config).positions)
        self.blocks = nn.Sequential(*(TextbookBlock(config) for _ in range(config.blocks)))
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens) * math.sqrt(self.config.width) + self.positions)
        return self.head(self.blocks(x).mean(1))


class Stepper:
    """One optimisation step at a time on a fixed random batch."""

    def __init__(self, model: nn.Module, length: int) -> None:
        self.model = model.train()
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, foreach=True)
        self.tokens = torch.randint(2, (25, length))
        self.labels = torch.randint(2, (25,))

    def step(self) -> float:
        start = time.perf_counter()
        # Our encoder would look for PAD; the trainer has looked once and says so.
        arguments = (self.tokens, False) if isinstance(self.model, Encoder) else (self.tokens,)
        loss = F.cross_entropy(self.model(*arguments), self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 0.5, foreach=True)
        self.optimizer.step()
        return time.perf_counter() - start


# The operations of each part, by the names torch's profiler gives them; first match counts, the rest is "other".
PARTS = {
    "linear layers": ("addmm", "::mm", "linear"),
    "scores, weighted sums": ("bmm", "_Strips"),
    "choosing keys": ("topk",),
    "dropout": ("Dropout", "geometric", "cumsum", "searchsorted", "index_fill", "index_copy"),
    "gather, scatter": ("embedding", "index", "bincount", "gather", "sort", "_SelectedScores", "_WeightedSum"),
    "loss": ("nll_loss", "log_softmax", "cross_entropy"),
    "softmax": ("softmax",),
    "norms": ("layer_norm",),
    "clipping, optimiser": ("_foreach", "linalg_vector_norm", "Optimizer"),
    "elementwise, copies": (
        "::add",
        "::mul",
        "::div",
        "::sum",
        "copy_",
        "::cat",
        "clamp_min",
        "threshold",
        "fill_",
    ),
}


def shares(stepper: Stepper, steps: int) -> dict[str, float]:
    """Share of each part in the time that operations spend themselves, over some steps."""
    stepper.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            stepper.step()
    spent = dict.fromkeys([*PARTS, "other"], 0.0)
    for event in profile.key_averages():
        part = next((p for p, names in PARTS.items() if any(name in event.key for name in names)), "other")
        spent[part] += event.self_cpu_time_total
    whole = sum(spent.values())
    return {part: time / whole for part, time in spent.items()}


def print_where() -> None:
    print("\n| batch × length, blocks | attention | " + " | ".join([*PARTS, "other"]) + " |")
    print("|---" * (len(PARTS) + 3) + "|")
    for length, blocks, steps in ((40, 5, 20), (600, 10, 2)):
        for attention in ("full", "topk"):
            found = shares(Stepper(Encoder(configuration(attention, length, blocks)), length), steps)
            cells = " | ".join(f"{share:.0%}" for share in found.values())
            print(f"| 25 × {length}, {blocks} | {attention} | {cells} |", flush=True)


def configuration(attention: str, length: int, blocks: int) -> ModelConfig:
    k = None if attention == "full" else 5
    return ModelConfig(vocabulary_size=3, classes=2, length=length, attention=attention, k=k, blocks=blocks)


def peak_memory(kind: str, attention: str, length: int, blocks: int) -> float:
    """Peak resident memory in MB of a process that does three steps."""
    command = [sys.executable, __file__, "--alone", kind, attention, str(length), str(blocks)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def alone(kind: str, attention: str, length: str, blocks: str) -> None:
    config = configuration(attention, int(length), int(blocks))
    stepper = Stepper((Encoder if kind == "semdiag" else Textbook)(config), config.length)
    for _ in range(3):
        stepper.step()
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(float(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--alone", nargs=4)
    parser.add_argument("--where", action="store_true", help="only say where the time goes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.alone:
        alone(*arguments.alone)
        return
    print(f"torch {torch.__version__}, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}")
    if arguments.where:
        print_where()
        return
    print("| batch × length, blocks | attention | semdiag ms | textbook ms | ratio | semdiag MB | textbook MB |")
    print("|---|---|---|---|---|---|---|")
    for length, blocks, steps in ((40, 5, 40), (600, 10, 5)):
        for attention in ("full", "topk"):
            config = configuration(attention, length, blocks)
            ours = Stepper(Encoder(config), length)
            theirs = Stepper(Textbook(config), length)
            pairs = [(ours.step(), theirs.step()) for _ in range(steps + 2)][2:]
            mine, textbook = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
            memory = [peak_memory(kind, attention, length, blocks) for kind in ("semdiag", "textbook")]
            print(
                f"| 25 × {length}, {blocks} | {attention} | {mine:.1f} | {textbook:.1f} | {mine / textbook:.2f} "
                f"| {memory[0]:.0f} | {memory[1]:.0f} |",
                flush=True,
            )
    print_where()


if __name__ == "__main__":
    main()
