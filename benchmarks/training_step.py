"""Time of a training step on a CPU, as a ratio to the paper's released model written as a textbook does.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/training_step.py [--where]

The textbook model is the same architecture with separate q, k, v projections, ``torch.nn.Dropout`` and boolean
masks: scores, ``topk``, scatter into the mask, ``masked_fill``, softmax. Steps of both models alternate, so both
see the same load of the machine. Times are CPU time on one thread. ``--where`` says where the time of ours goes.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models import Encoder, ModelConfig, Trainer, TrainingConfig
from semdiag_models.cuda_steps import Steps


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
        self.drop, self.drop_weights = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = self.q(normed), self.k(normed), self.v(normed)
        scores = q @ k.mT / math.sqrt(self.config.width)
        if self.config.k is not None:
            best = scores.topk(self.config.k, -1).indices
            kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
            scores = scores.masked_fill(~kept, -1e15)
        x = x + self.drop(self.out(self.drop_weights(scores.softmax(-1)) @ v))
        return x + self.mlp(self.mlp_norm(x))


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

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        self.model = Textbook(config).to(device).train()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, foreach=True)
        self.tokens, self.labels = (torch.randint(2, size, device=device) for size in ((25, config.length), (25,)))

    def __call__(self) -> None:
        loss = F.cross_entropy(self.model(self.tokens), self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 0.5, foreach=True)
        self.optimizer.step()


class OurStep:
    """What the trainer does with a batch."""

    def __init__(self, config: ModelConfig) -> None:
        training = TrainingConfig("parity", config.length, 1, train_samples=25, holdout_samples=25)
        trainer = Trainer(config, training, torch.device("cpu"))
        trainer.encoder.train()
        self.steps, self.batch = Steps([trainer]), torch.arange(25)[None]

    def __call__(self) -> None:
        self.steps._step(self.batch)


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
    return [1000 * statistics.median(each) for each in zip(*times, strict=True)]


def configuration(attention: str, length: int, blocks: int) -> ModelConfig:
    return ModelConfig(3, 2, length, attention, None if attention == "full" else 5, blocks=blocks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", action="store_true", help="say where the time goes")
    where = parser.parse_args().where
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}")
    print(
        "| batch × length, blocks | attention | semdiag ms | textbook ms | textbook / semdiag |\n"
        + "|---" * 5
        + "|"
    )
    for length, blocks, repeats, burst in ((40, 5, 25, 5), (600, 2, 5, 1)):
        for attention in ("full", "topk"):
            config = configuration(attention, length, blocks)
            ours, textbook = medians([OurStep(config), Step(config)], repeats, burst)
            cells = f"{ours:.1f} | {textbook:.1f} | {textbook / ours:.2f}"
            print(f"| 25 × {length}, {blocks} | {attention} | {cells} |", flush=True)
    for attention in ("full", "topk") if where else ():
        step = OurStep(configuration(attention, 40, 5))
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(20):
                step()
        print(profile.key_averages().table("self_cpu_time_total", row_limit=22, max_name_column_width=50))


if __name__ == "__main__":
    main()
