"""Twins of a small causal decoder under different masks; ``experiments/language.md`` registers the comparison.

    python experiments/language.py train bible.txt experiments/language [--device cuda]
    python experiments/language.py judge experiments/language

``train`` writes MASK-seed-SEED.csv when a run ends, and leaves out the runs that have one. A run takes about ten
minutes of one core.
"""

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from t_intervals import t_interval
from torch import Tensor, nn

from semdiag import row_statistics

MASKS = "full", "topk-4", "topk-8", "topk-16", "random-8", "window-8"
SEEDS = 51201, 51202, 51203
LENGTH, BATCH, STEPS, WARM, RATE, EVERY = 128, 16, 1500, 100, 2e-3, 100
LAYERS, HEADS, WIDTH = 4, 4, 128
HELD_OUT, TESTED = 20, 64  # one part in so many; windows
LEAST_KEYS, K, NOISE = 16, 8, 0.01


class Attention(nn.Module):
    """Causal attention over the keys that the mask keeps; it remembers q and k of its last call."""

    def __init__(self, mask: str, generator: torch.Generator) -> None:
        super().__init__()
        kind, _, number = mask.partition("-")
        self.kind, self.k = kind, int(number or LENGTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        order = torch.rand(HEADS, LENGTH, LENGTH, generator=generator)
        self.register_buffer("causal", causal, persistent=False)
        self.register_buffer("drawn", largest(order, causal, 8), persistent=False)
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None  # q, k, what is kept

    def forward(self, x: Tensor) -> Tensor:
        """Mix: (B, L, d) -> (B, L, d)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        kept = self.keep(scores.detach())
        self.seen = q.detach(), k.detach(), kept
        return self.out((scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def keep(self, scores: Tensor) -> Tensor:
        """Which keys each query keeps: bool, (B, H, L, L) or what broadcasts to it."""
        if self.kind == "topk":
            return largest(scores, self.causal, self.k)
        if self.kind == "random":
            return self.drawn
        if self.kind == "window":
            near = self.causal & ~self.causal.tril(-self.k)
            near[:, 0] = True
            return near
        return self.causal


def largest(scores: Tensor, causal: Tensor, k: int) -> Tensor:
    """The k allowed keys with the largest scores, as a mask of the scores' shape."""
    best = scores.masked_fill(~causal, -torch.inf).topk(k, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & causal


class Decoder(nn.Module):
    """Pre-norm blocks on bytes."""

    def __init__(self, mask: str, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        norms = [nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS)) for _ in range(2)]
        self.before_attention, self.before_mlp = norms
        self.attention = nn.ModuleList(Attention(mask, generator) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next byte: (B, L) -> (B, L, 256)."""
        x = self.embed(ids) + self.positions
        for first, attention, second, mlp in zip(
            self.before_attention, self.attention, self.before_mlp, self.mlp, strict=True
        ):
            x = x + attention(first(x))
            x = x + mlp(second(x))
        return self.head(self.last(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, nats: windows (B, L + 1)."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def parts(text: Path) -> tuple[Tensor, Tensor]:
    """The bytes to learn, and the windows held out."""
    data = torch.from_numpy(np.frombuffer(text.read_bytes(), np.uint8).astype(np.int64))
    end = len(data) - len(data) // HELD_OUT
    starts = torch.linspace(end, len(data) - LENGTH - 1, TESTED).long()
    return data[:end], windows_at(data, starts)


def windows_at(data: Tensor, starts: Tensor) -> Tensor:
    """Windows of a byte more than the context."""
    return data[starts[:, None] + torch.arange(LENGTH + 1)]


def train(
    text: Path, mask: str, seed: int, device: torch.device, steps: int = STEPS
) -> Iterator[dict[str, float]]:
    """Train a twin; yield a row after every evaluation, that of the initialisation first."""
    data, held_out = parts(text)
    held_out = held_out.to(device)
    torch.manual_seed(seed)
    model = Decoder(mask, seed).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    draw = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    for step in range(steps + 1):
        if step % EVERY == 0:
            learnt = float(torch.stack(losses).mean()) if losses else math.nan
            yield {
                "step": step,
                "bytes": step * BATCH * LENGTH,
                "train_loss": learnt,
                **looked_at(model, held_out),
            }
            losses = []
        fall = 0.5 * (1 + math.cos(math.pi * max(0, step - WARM) / (steps - WARM)))
        optimiser.param_groups[0]["lr"] = RATE * min((step + 1) / WARM, 0.1 + 0.9 * fall)
        windows = windows_at(data, torch.randint(len(data) - LENGTH, (BATCH,), generator=draw))
        loss = model.loss(windows.to(device))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.detach())


@torch.no_grad()
def looked_at(model: Decoder, held_out: Tensor) -> dict[str, float]:
    """Held-out loss, and medians over layers, heads and queries with at least 16 keys."""
    loss = float(model.loss(held_out))
    noise = torch.Generator().manual_seed(0)
    found: dict[str, list[Tensor]] = {name: [] for name in ("dispersion", "separation", "entropy", "stay")}
    for layer in model.attention:
        q, k, kept = (part.cpu() for part in layer.seen)
        kept, causal = kept.expand(*q.shape[:3], LENGTH), layer.causal.cpu()
        positions = torch.where(kept, torch.arange(LENGTH), -1).sort(-1, descending=True).values
        scale, rows = 1 / math.sqrt(q.shape[-1]), slice(LEAST_KEYS - 1, None)
        of_kept = row_statistics(q, k, scale, causal.expand(1, 1, -1, -1), positions)
        of_top = row_statistics(q, k, scale, top=K, causal=True)
        moved = [x + NOISE * x.norm(dim=-1, keepdim=True) * unit(x.shape, noise) for x in (q, k)]
        sets = [largest(a @ b.mT, causal, K) for a, b in ((q, k), moved)]
        found["dispersion"].append(of_kept.dispersion()[..., rows])
        found["separation"].append(of_top.separation(K)[..., LEAST_KEYS:])
        found["entropy"].append(of_kept.entropy[..., rows])
        found["stay"].append((sets[0] == sets[1]).all(-1)[..., rows].float())
    medians = {name: float(torch.cat(values).median()) for name, values in found.items() if name != "stay"}
    return {"held_out_loss": loss, **medians, "stay": float(torch.cat(found["stay"]).mean())}


def unit(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random directions."""
    return F.normalize(torch.randn(shape, generator=generator), dim=-1)


def judge(folder: Path) -> pd.DataFrame:
    """Differences to full attention, paired by seed; of masks and seeds that have both records."""
    runs = {(m, s): pd.read_csv(file) for m in MASKS for s in SEEDS if (file := record(folder, m, s)).exists()}
    losses = {place: run["held_out_loss"][1:] for place, run in runs.items()}  # without the initialisation's
    rows = []
    for mask in MASKS:
        seeds = [
            s for s in SEEDS if all((m, s) in runs and np.isfinite(losses[m, s]).all() for m in (mask, "full"))
        ]
        if not seeds:
            continue
        pairs = [(losses[mask, seed], losses["full", seed]) for seed in seeds]
        reached = [first_at(runs[mask, seed], full.iloc[-1]) for seed, (_, full) in zip(seeds, pairs, strict=True)]
        area = t_interval([own.mean() - full.mean() for own, full in pairs]).columns("area")
        end = t_interval([own.iloc[-1] - full.iloc[-1] for own, full in pairs]).columns("end")
        ends = pd.DataFrame([runs[mask, seed].iloc[-1] for seed in seeds]).mean().drop(["step", "bytes"])
        as_full = {"reach_full": int(np.isfinite(reached).sum()), "bytes_to_full": float(np.mean(reached))}
        rows.append({"mask": mask, "seeds": len(seeds), **area, **end, **as_full, **ends})
    return pd.DataFrame(rows)


def first_at(run: pd.DataFrame, loss: float) -> float:
    """Bytes seen at the first evaluation whose held-out loss is at most this; infinite where none is."""
    reached = run.loc[run["held_out_loss"] <= loss, "bytes"]
    return float(reached.min()) if len(reached) else math.inf


def record(folder: Path, mask: str, seed: int) -> Path:
    """Where a run is written."""
    return folder / f"{mask}-seed-{seed}.csv"


def main() -> None:
    """Train or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_subparsers(dest="asked", required=True)
    trains = asked.add_parser("train")
    trains.add_argument("text", type=Path)
    trains.add_argument("folder", type=Path)
    trains.add_argument("--device", default="cpu")
    trains.add_argument("--seed", type=int, choices=SEEDS, help="only this one")
    asked.add_parser("judge").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.asked == "judge":
        print(judge(given.folder).to_string(index=False, float_format="{:.4f}".format))
        return
    given.folder.mkdir(exist_ok=True)
    for seed in [given.seed] if given.seed else SEEDS:
        for mask in MASKS:
            file = record(given.folder, mask, seed)
            if file.exists():
                continue
            rows = []
            for row in train(given.text, mask, seed, torch.device(given.device), STEPS):
                rows.append(row)
                print(f"{mask} seed {seed} step {row['step']}: held out {row['held_out_loss']:.3f}", flush=True)
            part = file.with_suffix(".part")
            pd.DataFrame(rows).to_csv(part, index=False, float_format="%.6g")
            os.replace(part, file)


if __name__ == "__main__":
    main()
