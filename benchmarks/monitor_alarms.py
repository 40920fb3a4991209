"""Does an alarm come before the loss shows it? Small decoders, some made to diverge, some healthy.

    OMP_NUM_THREADS=1 python benchmarks/monitor_alarms.py

A decoder of two blocks learns to repeat twelve tokens, by Adam with 20 steps of warm-up: at a rate of 0.1, which
is too large, and at 0.003. A monitor looks at every row of every second step, by the rules of docs/python.md. The
loss says so at the first step at which it is above 1.5 times that of chance.
"""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from semdiag import Monitor

SEEDS, STEPS, WARM_UP, LETTERS = 3, 300, 20, 11
ALARM = {"max_logit": 50, "entropy": (0.05, "below"), "first_weight": ("doubles", 500, 0.5)}


class Decoder(nn.Module):
    """Two blocks of causal attention, two heads of width 16."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(LETTERS, 32), nn.Embedding(24, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.head = nn.Linear(32, LETTERS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = (part.view(*x.shape[:2], 2, 16).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + mlp(x)
        logits: torch.Tensor = self.head(x)
        return logits


def run(seed: int, rate: float) -> tuple[list[int | None], int | None, float]:
    """Return the steps of each rule's first alarm and of the loss showing it (None: never), and the last loss."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, alarms, diverged, value = Decoder().train(), [], None, math.nan
    optimizer = torch.optim.Adam(model.parameters())
    with Monitor(model, every=2, rows="all", alarm=ALARM, on_alarm=alarms.append):
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / WARM_UP)
            ids = torch.randint(LETTERS, (8, 12), generator=generator).repeat(1, 2)
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            value = loss.item()
            if diverged is None and step > 5 and not value < 1.5 * math.log(LETTERS):
                diverged = step
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first = {alarm.quantity: alarm.step for alarm in reversed(alarms)}
    return [first.get(quantity) for quantity in ALARM], diverged, value


def main() -> None:
    """Print one line per run."""
    warnings.simplefilter("ignore")
    names = "  ".join(ALARM)
    print(f"alarm {ALARM}, {STEPS} steps\nrate   seed  {names}  loss shows it  last loss")
    for rate in (0.1, 0.003):
        for seed in range(SEEDS):
            first, diverged, last = run(seed, rate)
            steps = "  ".join(f"{step!s:<{len(name)}}" for name, step in zip(ALARM, first, strict=True))
            print(f"{rate:<6} {seed:<5} {steps}  {diverged!s:<13}  {last:.4g}", flush=True)


if __name__ == "__main__":
    main()
