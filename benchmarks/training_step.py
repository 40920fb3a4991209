"""Time of the trainer's step, as a ratio to a textbook transformer on torch's own attention.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/training_step.py

The textbook model is the same architecture with separate q, k, v projections, ``torch.nn.Dropout``, and
``scaled_dot_product_attention`` with a boolean mask (top-k: scores, ``topk``, scatter into the mask). Steps of
both models alternate with the matrix products that both need and nothing else, so all see the same load of the
machine; short ones in bursts, since in training, too, a step finds in the caches what the last one left. Times
are CPU time; memory is the peak of resident memory of a process of its own that does three steps.
Then: several runs in one step, as ratios per run to one alone; the evaluation after an epoch beside its products;
where the time goes (``--where`` prints that alone).
"""

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models import Encoder, ModelConfig, TrainingConfig
from semdiag_models.attention.attention import SHORT
from semdiag_models.step import Stack, random_state
from semdiag_models.training import Trainer


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


class Step:
    """Optimisation steps of the textbook model on a fixed random batch."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = Textbook(config).train()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, foreach=True)
        self.tokens, self.labels = torch.randint(2, (25, config.length)), torch.randint(2, (25,))

    def __call__(self) -> None:
        loss = F.cross_entropy(self.model(self.tokens), self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 0.5, foreach=True)
        self.optimizer.step()


class OurStep:
    """What the trainer does with a batch, for one model or several at once."""

    def __init__(self, *configs: ModelConfig) -> None:
        device = torch.device("cpu")
        states = [random_state(device) for _ in configs] if len(configs) > 1 else None
        self.stack = Stack([Encoder(config) for config in configs], states)
        self.stack.load()
        parameters = nn.Parameter(self.stack.parameters)
        parameters.grad = self.stack.gradients
        self.optimizer = torch.optim.SGD([parameters], lr=0.1, foreach=True)
        self.tokens = torch.randint(2, (len(configs), 25, configs[0].length))
        self.labels = torch.randint(2, (len(configs), 25))

    def __call__(self) -> None:
        self.stack.differentiate(self.tokens, self.labels, padded=False)
        with torch.inference_mode():
            self.stack.clip_gradients(0.5)
            self.optimizer.step()


class Products:
    """The matrix products of a step and nothing else: the floor of both."""

    def __init__(self, config: ModelConfig) -> None:
        rows, d, self.blocks = 25 * config.length, config.width, config.blocks
        self.x, self.qkv, self.w, self.w3 = (
            torch.randn(n, m) for n, m in ((rows, d), (rows, 3 * d), (d, d), (3 * d, d))
        )
        self.of_keys = torch.randn(25, config.length, d)
        self.scores = torch.randn(25, config.length, config.length)
        self.dense = 3 if config.k is None or config.length <= SHORT else 0  # pairs of products; else scores alone

    def __call__(self) -> None:
        for _ in range(self.blocks):
            torch.mm(self.x, self.w3.T, out=self.qkv)
            torch.mm(self.qkv.T, self.x)
            torch.mm(self.qkv, self.w3)
            for _ in range(3):
                torch.mm(self.x, self.w.T)
                torch.mm(self.x.T, self.x)
                torch.mm(self.x, self.w)
            torch.bmm(self.of_keys, self.of_keys.mT, out=self.scores)
            for _ in range(self.dense):
                torch.bmm(self.scores, self.of_keys)
            for _ in range(self.dense - 1):
                torch.bmm(self.of_keys, self.of_keys.mT, out=self.scores)


def seconds(step: Callable[[], None], burst: int) -> float:
    """CPU time of one call of a burst; other processes on the machine lengthen it less than they do the wall's."""
    start = time.process_time()
    for _ in range(burst):
        step()
    return (time.process_time() - start) / burst


def medians(steps: list[Callable[[], None]], repeats: int, burst: int = 1) -> list[float]:
    """Median milliseconds of each, in alternation."""
    for step in steps * 2:
        step()
    times = [[seconds(step, burst) for step in steps] for _ in range(repeats)]
    return [1000 * statistics.median(own) for own in zip(*times, strict=True)]


# The operations of each part, by the names torch's profiler gives them; first match counts, the rest is "other".
PARTS = {
    "products": ("addmm", "::mm", "bmm", "linear"),
    "choosing keys": ("topk", "threshold_", "amin", "amax", "minimum"),
    "dropout": ("Dropout", "geometric", "cumsum", "searchsorted", "index_fill", "index_copy", "index_select"),
    "gather, scatter": ("embedding", "index", "bincount", "gather", "sort", "_Selected"),
    "softmax": ("softmax",),
    "norms": ("layer_norm", "linalg_vector_norm"),
    "optimiser": ("Optimizer",),
    "elementwise, copies": (
        "::add",
        "::mul",
        "::div",
        "::sub",
        "::sum",
        "::mean",
        "copy_",
        "::cat",
        "relu",
        "threshold",
    ),
}


def shares(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Share of each part in the time that operations spend themselves, over some steps."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            step()
    spent = dict.fromkeys([*PARTS, "other"], 0.0)
    for event in profile.key_averages():
        part = next((p for p, names in PARTS.items() if any(name in event.key for name in names)), "other")
        spent[part] += event.self_cpu_time_total
    whole = sum(spent.values())
    return {part: time / whole for part, time in spent.items()}


def configuration(attention: str, length: int, blocks: int, width: int = 64) -> ModelConfig:
    sizes = {"length": length, "blocks": blocks, "width": width, "mlp_width": width, "head_width": width}
    return ModelConfig(
        vocabulary_size=3, classes=2, attention=attention, k=None if attention == "full" else 5, **sizes
    )


def peak_memory(kind: str, attention: str, length: int, blocks: int) -> float:
    """Peak resident memory in MB of a process that does three steps."""
    command = [sys.executable, __file__, "--alone", kind, attention, str(length), str(blocks)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def alone(kind: str, attention: str, length: str, blocks: str) -> None:
    step = (OurStep if kind == "semdiag" else Step)(configuration(attention, int(length), int(blocks)))
    for _ in range(3):
        step()
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(float(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024)


def print_steps() -> None:
    columns = "products ms", "semdiag ms", "textbook ms", "ratio", "MB", "textbook MB"
    print("| batch × length, blocks | attention | " + " | ".join(columns) + " |")
    print("|---" * 8 + "|")
    for length, blocks, repeats, burst in ((40, 5, 12, 10), (600, 10, 5, 1)):
        for attention in ("full", "topk"):
            config = configuration(attention, length, blocks)
            floor, ours, theirs = medians([Products(config), OurStep(config), Step(config)], repeats, burst)
            memory = [peak_memory(kind, attention, length, blocks) for kind in ("semdiag", "textbook")]
            print(
                f"| 25 × {length}, {blocks} | {attention} | {floor:.1f} | {ours:.1f} | {theirs:.1f} "
                f"| {ours / theirs:.2f} | {memory[0]:.0f} | {memory[1]:.0f} |",
                flush=True,
            )


def print_at_once() -> None:
    print("\n| batch × length, width, blocks | attention | one ms | 3 seeds | 6 seeds | 9 runs of 3 masks |")
    print("|---" * 6 + "|")
    for length, width, blocks, repeats in ((20, 32, 2, 12), (40, 64, 5, 6)):
        full, topk, random = (configuration(a, length, blocks, width) for a in ("full", "topk", "random"))
        for config in (full, topk):
            counts, masks = (1, 3, 6), [full] * 3 + [topk] * 3 + [random] * 3
            several = [OurStep(*[config] * n) for n in counts]
            alone, three, six, mixed = medians([*several, OurStep(*masks)], repeats, 5)
            cells = " | ".join(f"{ms / n / alone:.2f}" for ms, n in ((three, 3), (six, 6), (mixed, 9)))
            print(f"| 25 × {length}, {width}, {blocks} | {config.attention} | {alone:.1f} | {cells} |", flush=True)


class Evaluation:
    """The trainer's evaluation of 7,000 samples, and the matrix products in it."""

    def __init__(self, config: ModelConfig) -> None:
        training = TrainingConfig("even-pairs", config.length, 1, train_samples=25, holdout_samples=7000)
        self.trainer = Trainer(config, training, torch.device("cpu"))
        rows, d, self.times = 125 * config.length, config.width, 56 * config.blocks
        self.x, self.w, self.w3 = torch.randn(rows, d), torch.randn(d, d), torch.randn(3 * d, d)
        self.of_keys = torch.randn(125, config.length, d)
        self.scores = torch.randn(125, config.length, config.length)

    def __call__(self) -> None:
        self.trainer.evaluate(self.trainer.holdout_split)

    def products(self) -> None:
        for _ in range(self.times):
            torch.mm(self.x, self.w3.T)
            for _ in range(3):
                torch.mm(self.x, self.w.T)
            torch.bmm(self.of_keys, self.of_keys.mT)
            torch.bmm(self.scores, self.of_keys)


def print_evaluation() -> None:
    print("\n| samples × length, blocks | attention | products ms | evaluation ms | ratio |")
    print("|---" * 5 + "|")
    for attention in ("full", "topk"):
        evaluation = Evaluation(configuration(attention, 40, 5))
        floor, whole = medians([evaluation.products, evaluation], 5)
        print(f"| 7000 × 40, 5 | {attention} | {floor:.0f} | {whole:.0f} | {whole / floor:.2f} |", flush=True)


def print_where() -> None:
    print("\n| batch × length, blocks | attention | " + " | ".join([*PARTS, "other"]) + " |")
    print("|---" * (len(PARTS) + 3) + "|")
    for length, blocks, steps in ((40, 5, 20), (600, 10, 2)):
        for attention in ("full", "topk"):
            parts = shares(OurStep(configuration(attention, length, blocks)), steps)
            cells = " | ".join(f"{share:.0%}" for share in parts.values())
            print(f"| 25 × {length}, {blocks} | {attention} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", nargs=4)
    parser.add_argument("--where", action="store_true", help="only say where the time goes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.alone:
        alone(*arguments.alone)
        return
    print(f"torch {torch.__version__}, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}")
    if not arguments.where:
        print_steps()
        print_at_once()
        print_evaluation()
    print_where()


if __name__ == "__main__":
    main()
