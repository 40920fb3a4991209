"""Twins on training sets that differ in one sample: is top-5 more uniformly stable? ``stability.md`` registers it.

    python experiments/stability.py run runs/stability
    python experiments/stability.py pack runs/stability experiments/stability
    python experiments/stability.py unpack experiments/stability runs/stability
    python experiments/stability.py judge experiments/stability --out reports/stability

``run`` writes a table for every block (task, attention, seed) when its six runs end, and leaves out the blocks
that have one. ``pack`` joins the tables by task, ``unpack`` parts them again: ``run`` then goes on where another
machine stopped. ``judge`` writes what the registration asks, once every block is there.
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from t_intervals import UNKNOWN, t_interval
from torch import Tensor

from semdiag_models import ModelConfig, TrainingConfig
from semdiag_models.tasks import find_task
from semdiag_models.train import Trainer

TASKS = {"even-pairs": 20, "missing-duplicate": 20, "cycle-navigation": 10}  # length
ATTENTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "topk-5": {"attention": "topk", "k": 5},
    "random-5": {"attention": "random", "k": 5},
    "full-times-4": {"inverse_temperature": 4.0},
}
SEEDS = tuple(range(57001, 57009))
EPOCHS, SAMPLES, FRESH, TWINS, MOVE = 150, 500, 1000, 4, 1e-7
MEMBERS = ("base", *(f"twin-{i}" for i in range(1, TWINS + 1)), "null")
EVERY, SHOWN = 2, (10, 30, 60, 100, 150)  # epochs that are probed, and those in the tables
AT_ONCE = 100  # fresh inputs
LEAST = 1e-7  # changes of a loss below it are rounding
APART = 1.25  # training losses by more than this factor are not matched
LEARNT = 0.9  # of ln(classes): above it nothing is learnt that could be matched


def configured(task: str, attention: str, seed: int) -> Trainer:
    """A trainer of the base run, with its samples and, after them, those that replace one."""
    kind = find_task(task)
    drawn = {"selection_seed": seed} if attention.startswith("random") else {}
    model = ModelConfig(
        *(kind.vocabulary_size, kind.classes, TASKS[task]),
        blocks=2,
        width=32,
        mlp_width=32,
        head_width=32,
        dropout=0.0,
        **ATTENTIONS[attention],
        **drawn,
    )
    training = TrainingConfig(
        task, TASKS[task], EPOCHS, seed, train_samples=SAMPLES + TWINS, holdout_samples=FRESH, batch_size=25
    )
    return Trainer(model, training, torch.device("cpu"))


def twin_sets(trainer: Trainer) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (6, n, L) and labels (6, n) of every member, and which sample is replaced in each twin."""
    tokens, labels = (
        part[:SAMPLES].expand(len(MEMBERS), *part[:SAMPLES].shape).clone() for part in trainer.train_split
    )
    chosen = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(trainer.training.seed))[:TWINS]
    twins = torch.arange(1, TWINS + 1)
    tokens[twins, chosen], labels[twins, chosen] = (part[SAMPLES:] for part in trainer.train_split)
    return tokens, labels, chosen


def train(task: str, attention: str, seed: int, epochs: int | None = None, move: float = MOVE) -> pd.DataFrame:
    """Train a base run, its twins and its null twin in one stack; a row for every member and probed epoch."""
    from semdiag_models.step import Split, Stack  # of release 0.7.2, whose trainer the registration names

    with torch.random.fork_rng(devices=[]):
        trainer = configured(task, attention, seed)
        tokens, labels, chosen = twin_sets(trainer)
        fresh = [part.expand(len(MEMBERS), *part.shape) for part in trainer.holdout_split]
        encoders = [trainer.encoder] * len(MEMBERS)
        stack = Stack(encoders)
        stack.load()
        directions = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, stack.parameters[-1].shape, generator=directions) * 2 - 1
        stack.parameters[-1] += move * signs * (stack.parameters[-1] != 0)  # not the gaps of the buffer
        path = Recursions(stack)
        rows, member = [], torch.arange(len(MEMBERS))[:, None]
        for epoch in range(1, (epochs or EPOCHS) + 1):
            rate = trainer.training.learning_rate * trainer.training.learning_rate_decay ** (epoch - 1)
            for batch in torch.randperm(SAMPLES).split(trainer.training.batch_size):
                stack.differentiate(tokens[member, batch], labels[member, batch], False)
                norms = torch.linalg.vector_norm(stack.gradients, dim=1).double()
                stack.clip_gradients(trainer.training.gradient_clip)
                path.step(rate, norms, trainer.training.gradient_clip, (batch[:, None] == chosen).any(0))
                stack.parameters.sub_(stack.gradients, alpha=rate)
            if epoch % EVERY == 0:
                stack.store(0)
                train_loss = trainer.evaluate(Split(tokens[0], labels[0]))[0]
                rows.append(probe(stack, fresh, path).assign(train_loss=train_loss, epoch=epoch))
    return pd.concat(rows).assign(task=task, attention=attention, seed=seed)


class Recursions:
    """What the recursion (1 + η γ̂) d + 2 η L̂ / n says of the distance, with constants measured at every step.

    γ̂ is the difference of two members' clipped gradients of one batch over their distance; the batches with the
    replaced sample take the last one. ``followed`` adds 2 η L̂ at these batches, and is never below the distance.
    """

    def __init__(self, stack: Any) -> None:
        self.stack = stack
        self.samples = torch.tensor([1.0] * TWINS + [0.0], dtype=torch.float64)  # the null twin replaces none
        start = self.distance()
        self.expected, self.followed = start.log(), start.log()
        self.growth, self.largest_growth = torch.zeros_like(start), torch.zeros_like(start)
        self.largest_gradient = torch.zeros(len(MEMBERS), dtype=torch.float64)

    def distance(self) -> Tensor:
        """Of each member from the base."""
        return torch.linalg.vector_norm(self.stack.parameters[1:] - self.stack.parameters[0], dim=1).double()

    def step(self, rate: float, norms: Tensor, clip: float, touched: Tensor) -> None:
        """Follow a step of SGD with clipped gradients, before it is taken."""
        gradients, distance = self.stack.gradients, self.distance()
        apart = torch.linalg.vector_norm(gradients[1:] - gradients[0], dim=1).double()
        touched = torch.cat([touched, torch.tensor([False])])
        known = ~touched & (distance > 0)
        self.growth = torch.where(known, apart / distance, self.growth)
        added = 2 * rate * torch.maximum(norms[1:], norms[0]).clamp(max=clip) * self.samples
        grown = torch.log1p(rate * self.growth)
        self.expected = torch.logaddexp(self.expected + grown, (added / SAMPLES).log())
        kicked = torch.logaddexp(self.followed, added.log())
        self.followed = torch.where(touched, kicked, self.followed + grown)
        self.largest_growth = torch.maximum(self.largest_growth, self.growth)
        self.largest_gradient = torch.maximum(self.largest_gradient, norms)


def probe(stack: Any, fresh: list[Tensor], path: Recursions) -> pd.DataFrame:
    """What the outcomes need of every member."""
    tokens, labels = fresh
    logits = torch.cat([stack.logits(part, False) for part in tokens.split(AT_ONCE, 1)], 1).double()
    losses = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    change = (losses[1:] - losses[0]).abs()
    of_twins = {
        "largest_change": change.max(1).values,
        "mean_change": change.mean(1),
        "distance": path.distance(),
        "ln_expected": path.expected,
        "ln_followed": path.followed,
        "largest_growth": path.largest_growth,
    }
    return pd.DataFrame(
        {
            "member": MEMBERS,
            "fresh_loss": losses.mean(1),
            "fresh_accuracy": (logits.argmax(-1) == labels).double().mean(1),
            "largest_gradient": path.largest_gradient,
            **{name: torch.cat([torch.tensor([math.nan]), values]) for name, values in of_twins.items()},
        }
    )


def run(folder: Path) -> None:
    """Train the blocks that have no table, seed by seed, and say how long the rest may take."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [(task, attention, seed) for seed in SEEDS for task in TASKS for attention in ATTENTIONS]
    rest = [block for block in blocks if not block_file(folder, *block).exists()]
    begun = time.time()
    for done, block in enumerate(rest):
        start, clock = time.time(), time.process_time()
        table = train(*block)
        seconds, own = time.time() - start, time.process_time() - clock
        table["core_seconds"] = own
        write(table, block_file(folder, *block))
        left = (time.time() - begun) / (done + 1) * (len(rest) - done - 1) / 60
        said = f"{seconds:.0f} s, {own:.0f} s of a core; {len(rest) - done - 1} blocks, {left:.0f} minutes left"
        print(time.strftime("%H:%M"), *block, said, flush=True)


def block_file(folder: Path, task: str, attention: str, seed: int) -> Path:
    """Where a block's table is."""
    return folder / f"{task}-{attention}-{seed}.parquet"


def write(table: pd.DataFrame, file: Path) -> None:
    """Write a table at once or not at all, in float32."""
    part = file.with_suffix(".part")
    wide = table.select_dtypes("float64").columns
    table.astype(dict.fromkeys(wide, "float32")).to_parquet(part, index=False, compression="zstd")
    os.replace(part, file)


def pack(folder: Path, out: Path) -> None:
    """Join the blocks' tables into one a task."""
    out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        files = [block_file(folder, task, attention, seed) for seed in SEEDS for attention in ATTENTIONS]
        tables = [pd.read_parquet(file) for file in files if file.exists()]
        if tables:
            write(pd.concat(tables), out / f"{task}.parquet")


def unpack(folder: Path, out: Path) -> None:
    """Part the tasks' tables into one a block."""
    out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for (attention, seed), table in pd.read_parquet(folder / f"{task}.parquet").groupby(["attention", "seed"]):
            write(table, block_file(out, task, str(attention), int(seed)))


def read(folder: Path) -> pd.DataFrame:
    """The tables of :func:`pack`, of the seeds whose blocks are all there, with the run's own training loss."""
    table = pd.concat([pd.read_parquet(file) for file in sorted(folder.glob("*.parquet"))], ignore_index=True)
    blocks = table.groupby("seed")[["task", "attention"]].apply(lambda own: len(own.drop_duplicates()))
    whole = blocks[blocks == len(TASKS) * len(ATTENTIONS)].index
    return table[table["seed"].isin(whole)].astype({"largest_change": "float64", "train_loss": "float64"})


def ln_changes(table: pd.DataFrame, of: str = "twin", name: str = "largest_change") -> pd.DataFrame:
    """ln ε̂, the mean over a run's twins: a row per task, attention and seed, a column per epoch."""
    own = table[table["member"].str.startswith(of)]
    logarithms = np.log(own[name].clip(lower=LEAST))
    keys = [own[key] for key in ("task", "attention", "seed", "epoch")]
    runs = logarithms.groupby(keys, sort=False)
    return runs.mean().where(runs.count() == runs.size()).unstack("epoch")  # unknown where a twin's is


def matched(losses: pd.DataFrame, classes: int) -> tuple[float, pd.Series]:
    """The level that both runs reach, and the epoch of each that is nearest to it.

    Args:
        losses: training losses, a row per run and a column per epoch.
        classes: of the task.
    """
    level = max(math.log(classes) / 2, losses.min(axis=1).max())
    return level, (losses - level).abs().idxmin(axis=1)


def ratios(table: pd.DataFrame) -> pd.DataFrame:
    """ln of an attention's over full attention's ε̂, for every pair and moment; NaN where losses do not match."""
    changes = ln_changes(table)
    base = table[table["member"] == "base"]
    losses = base.pivot(index=["task", "attention", "seed"], columns="epoch", values="train_loss")
    rows = []
    for task, attention, seed in changes.index:
        if attention == "full":
            continue
        pair = [(task, attention, seed), (task, "full", seed)]
        own, full = (changes.loc[place] for place in pair)
        classes = find_task(task).classes
        level, epochs = matched(losses.loc[pair].fillna(math.inf), classes)
        reached = [losses.loc[place, epoch] for place, epoch in epochs.items()]
        alike = abs(math.log(reached[0] / reached[1])) <= math.log(APART) and level <= LEARNT * math.log(classes)
        at_match = own[epochs.iloc[0]] - full[epochs.iloc[1]] if alike else math.nan
        found = {
            "equal epoch": (own - full).mean(skipna=False),
            "matched loss": at_match,
            "end": own.iloc[-1] - full.iloc[-1],
        }
        facts = {"task": task, "attention": attention, "seed": seed}
        rows += [{**facts, "moment": moment, "ln_ratio": value} for moment, value in found.items()]
    return pd.DataFrame(rows)


def verdicts(found: pd.DataFrame) -> pd.DataFrame:
    """By task, attention and moment: the mean over seeds, its t-interval, and what it says."""
    rows = []
    for key, own in found.groupby(["task", "attention", "moment"], sort=False):
        known = own["ln_ratio"].dropna()
        mean = t_interval(known.to_numpy()) if len(known) > 1 else UNKNOWN
        said = "more stable" if mean.high < 0 else "less stable" if mean.low > 0 else "cannot tell"
        unmatched = " ".join(map(str, own.loc[own["ln_ratio"].isna(), "seed"]))
        numbers = {"pairs": len(known), "ln_ratio": mean.estimate, "low": mean.low, "high": mean.high}
        facts = dict(zip(("task", "attention", "moment"), key, strict=True))
        rows.append({**facts, **numbers, "verdict": said, "unmatched": unmatched})
    return pd.DataFrame(rows)


def secondary(table: pd.DataFrame) -> pd.DataFrame:
    """By task, attention and shown epoch: means over seeds, of logarithms except for losses and the gap."""
    twins, null = table[table["member"].str.startswith("twin")], table[table["member"] == "null"]
    base = table[table["member"] == "base"]
    rate, clip = 0.1, 0.5
    growth, steps = rate * twins["largest_growth"], twins["epoch"] * SAMPLES // 25
    kick = np.log(2 * rate * twins["largest_gradient"].clip(upper=clip) / SAMPLES)
    worst = kick + steps * np.log1p(growth) - np.log(growth)  # a geometric sum
    logarithms = {
        "ln_change": np.log(twins["largest_change"].clip(lower=LEAST)),
        "ln_distance": np.log(twins["distance"]),
        "ln_expected": twins["ln_expected"],
        "ln_followed": twins["ln_followed"],
        "ln_worst": worst,
        "ln_bound": np.log(twins["largest_gradient"]) + twins["ln_expected"],
    }
    keys = ["task", "attention", "epoch", "seed"]
    by_run = pd.DataFrame({**{key: twins[key] for key in keys}, **logarithms}).groupby(keys).mean()
    by_run["ln_largest_of_twins"] = np.log(twins.groupby(keys)["largest_change"].max().clip(lower=LEAST))
    by_run["ln_null_change"] = np.log(null.set_index(keys)["largest_change"].clip(lower=LEAST))
    by_run["ln_null_distance"] = np.log(null.set_index(keys)["distance"])
    base = base.set_index(keys)
    by_run["train_loss"], by_run["fresh_accuracy"] = base["train_loss"], base["fresh_accuracy"]
    by_run["gap"] = base["fresh_loss"] - base["train_loss"]
    by_run["gap_within_change"] = (by_run["gap"].abs() <= np.exp(by_run["ln_largest_of_twins"])).astype(float)
    by_run["gap_within_bound"] = (np.log(by_run["gap"].abs()) <= by_run["ln_bound"]).astype(float)
    shown = by_run[by_run.index.get_level_values("epoch").isin(SHOWN)]
    return shown.groupby(["task", "attention", "epoch"], sort=False).mean().reset_index()


def judge(folder: Path, out: Path) -> None:
    """Write and print what the registration asks, once all is there."""
    table = read(folder)
    through, registered = len(table.drop_duplicates(["task", "attention", "seed"])), 12 * len(SEEDS)
    if through < registered:
        raise SystemExit(
            f"Nothing is judged before all {registered} blocks are there. {through} are, of whole seeds."
        )
    found = ratios(table)
    out.mkdir(parents=True, exist_ok=True)
    answers = verdicts(found)
    found.to_csv(out / "ratios.csv", index=False, float_format="%.6g")
    answers.to_csv(out / "verdicts.csv", index=False, float_format="%.6g")
    secondary(table).to_csv(out / "secondary.csv", index=False, float_format="%.6g")
    print(answers.to_string(index=False, float_format="{:.2f}".format))
    runs = table.drop_duplicates(["task", "attention", "seed", "member"])
    hours = runs.loc[runs["member"] == "base", "core_seconds"].sum() / 3600
    broken = table.loc[
        ~np.isfinite(table["fresh_loss"]), ["task", "attention", "seed", "member"]
    ].drop_duplicates()
    print(f"{len(runs)} runs of {runs['seed'].nunique()} whole seeds, {hours:.2f} core hours.")
    print(f"Losses that are not finite: {broken.to_numpy().tolist() or 'none'}.")


def main() -> None:
    """Run, pack, unpack or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_subparsers(dest="asked", required=True)
    asked.add_parser("run").add_argument("folder", type=Path)
    for name in ("pack", "unpack", "judge"):
        own = asked.add_parser(name)
        own.add_argument("folder", type=Path)
        own.add_argument("--out" if name == "judge" else "out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.asked == "run":
        run(given.folder)
    elif given.asked in ("pack", "unpack"):
        {"pack": pack, "unpack": unpack}[given.asked](given.folder, given.out)
    else:
        judge(given.folder, given.out)


if __name__ == "__main__":
    main()
