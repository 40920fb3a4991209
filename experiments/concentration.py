"""Concentration at equal δ, and the other way round: the study that ``concentration.md`` registers.

    python experiments/concentration.py power
    python experiments/concentration.py run runs/concentration [--primary]
    python experiments/concentration.py pack runs/concentration experiments/concentration
    python experiments/concentration.py unpack experiments/concentration runs/concentration
    python experiments/concentration.py judge experiments/concentration --out reports/concentration

``run`` writes a table for every block (task, attention, four seeds) when it ends, and leaves out those that have
one. ``judge`` compares two attentions on a task when all their registered runs are there.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from fresh_seeds import refuse_used
from t_intervals import UNKNOWN, t_interval
from torch import Tensor

from semdiag.measuring.findings.resampling import Interval
from semdiag_files import InputError
from semdiag_models import AttentionCore, DivergedError, Encoder, configure, find_task
from semdiag_models.fast_attention import dropout
from semdiag_models.train import Progress, Trainer, train_together

HERE = Path(__file__).parent
LENGTH, K, EPOCHS = 20, 5, 120
SEEDS = tuple(range(67201, 67209))
PRIMARY = "even-pairs", "missing-duplicate"
TASKS = *PRIMARY, "stack-manipulation", "cycle-navigation", "modular-arithmetic", "solve-equation", "parity"
FULL, TOP, MATCHED, HALF, STRAIGHT = (
    "full", "topk-5", "matched-full", "topk-5-times-0.5", "topk-5-straight-through",
)  # fmt: skip
ATTENTIONS: dict[str, dict[str, Any]] = {
    FULL: {},
    TOP: {"attention": "topk", "k": K},
    MATCHED: {},
    HALF: {"attention": "topk", "k": K, "inverse_temperature": 0.5},
    STRAIGHT: {"attention": "topk", "k": K, "score_gradient": "straight-through"},
}
SIZES = {
    "blocks": 2,
    "width": 32,
    "mlp_width": 32,
    "head_width": 32,
    "train_samples": 2500,
    "holdout_samples": 500,
}
LITTLE = math.log(1.25)  # mean losses that differ by less than a quarter
LEARNT = 0.1  # of the way from the shortcut to 100%: no task says anything on which all attentions stay below
SHARPEST = 2.0**16  # largest factor of a row
BISECTIONS, NEWTON_STEPS = 10, 3
AT_ONCE = 4  # seeds that share their steps
INPUTS = 50  # held-out inputs on which δ and Σp² are measured
Explanations = dict[str, dict[str, str]]
EXPLANATIONS: Explanations = {  # what each expects of an attention's area less that of top-5
    "a small δ and ξ": {MATCHED: "slower", HALF: "faster"},
    "concentration": {MATCHED: "alike", HALF: "slower"},
    "selective gradients": {MATCHED: "slower", STRAIGHT: "slower"},
}


def concentration(weights: Tensor) -> Tensor:
    """Return Σ_j p_j² of each row: the inverse of how many keys share the weight."""
    return weights.square().sum(-1)


@torch.no_grad()
def matching_factors(scores: Tensor, k: int) -> Tensor:
    """Return the factor on each row with which full attention is as concentrated as top-k on the same scores.

    β ≥ 1 solves Σ_j softmax(β s)_j² = Σ_j softmax(s over its k largest)_j². The left side rises with β: its
    derivative is 2 Σ_j p_j² (s_j − E_p s), a covariance of two functions that rise with s. At β = 1 it is not
    above the right one, as leaving out the smallest weight never lowers Σ p². Found by bisection of ln β, then by
    Newton's method within the bracket; at most 2¹⁶, which rows need whose scores are all but equal.

    Args:
        scores: (…, L, L).
        k: of top-k.

    Returns:
        β, (…, L, 1); it has no gradient.

    Example:
        >>> scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        >>> sharper = (matching_factors(scores, 2) * scores).softmax(-1)
        >>> concentration(sharper).item(), concentration(scores[:, :2].softmax(-1)).item()  # doctest: +ELLIPSIS
        (0.606..., 0.606...)
    """
    wanted = concentration(scores.topk(min(k, scores.shape[-1]), -1).values.softmax(-1))[..., None]
    shifted = scores - scores.amax(-1, keepdim=True)
    low = torch.zeros_like(wanted)
    high = torch.full_like(wanted, math.log(SHARPEST))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = torch.softmax(middle.exp() * shifted, -1).square_().sum(-1, keepdim=True) > wanted
        high = torch.where(above, middle, high)
        low = torch.where(above, low, middle)
    logarithm = (low + high) / 2
    for _ in range(NEWTON_STEPS):
        sharper = logarithm.exp() * shifted
        weights = sharper.softmax(-1)
        squares = weights.square()
        total = squares.sum(-1, keepdim=True)
        mean = (weights * sharper).sum(-1, keepdim=True)
        slope = 2 * ((squares * sharper).sum(-1, keepdim=True) / total - mean)  # of ln Σp² in ln β
        step = (total.log() - wanted.log()) / slope.clamp(min=1e-6)
        logarithm = torch.clamp(logarithm - step, low, high)
    return logarithm.exp()


class MatchedCore(AttentionCore):
    """Full attention, each row as concentrated as top-k would be on the same scores."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor | None
    ) -> Tensor:
        """Mix the values: (B, H, L, D), … -> (B, H, L, D)."""
        if valid is not None or selected is not None:
            raise InputError("Matched attention takes neither padding nor a mask.")
        scores = scale * (q @ k.mT)
        weights = (matching_factors(scores.detach(), K) * scores).softmax(-1)
        return dropout(weights, self.p, self.training) @ v


def configured(task: str, attention: str, seed: int, epochs: int = EPOCHS) -> Trainer:
    """Return the trainer of a run."""
    chosen = {"length": LENGTH, "epochs": epochs, "seed": seed, "fresh_samples": True}
    model, training = configure(find_task(task), {**SIZES, **chosen, **ATTENTIONS[attention]})
    trainer = Trainer(model, training, torch.device("cpu"))
    if attention == MATCHED:
        for layer in range(model.blocks):
            part = trainer.encoder.attention(layer)
            part.core = MatchedCore(model)
    return trainer


def look(encoder: Encoder, tokens: Tensor) -> dict[str, float]:
    """Return the median δ over kept keys and the mean Σp² of all rows of all layers."""
    ranges: list[Tensor] = []
    squares: list[Tensor] = []

    def collect(core: AttentionCore, inputs: tuple[Any, ...]) -> None:
        q, k, _, scale, _, selected = inputs
        scores = scale * (q @ k.mT)
        if isinstance(core, MatchedCore):
            scores = matching_factors(scores, K) * scores
        if selected is not None:
            scores = scores.gather(-1, selected)
        ranges.append((scores.amax(-1) - scores.amin(-1)).flatten())
        squares.append(concentration(scores.softmax(-1)).flatten())

    cores = [encoder.attention(layer).core for layer in range(encoder.config.blocks)]
    hooks = [core.register_forward_pre_hook(collect) for core in cores]
    encoder.eval()
    try:
        with torch.no_grad():
            encoder(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return {"dispersion": float(torch.cat(ranges).median()), "concentration": float(torch.cat(squares).mean())}


def train(task: str, attention: str, seeds: tuple[int, ...], epochs: int = EPOCHS) -> pd.DataFrame:
    """Train the runs of several seeds together; return a row for each run and epoch, the initialisation first.

    The table of a run that diverges ends with an epoch without numbers.
    """
    with torch.random.fork_rng(devices=[]):
        trainers = [configured(task, attention, seed, epochs) for seed in seeds]
        inputs = [trainer.holdout_split.tokens[:INPUTS] for trainer in trainers]
        rows: dict[int, list[dict[str, float]]] = {
            trainer.training.seed: [{"epoch": 0, **look(trainer.encoder, tokens)}]
            for trainer, tokens in zip(trainers, inputs, strict=True)
        }

        def after_epoch(trainer: Trainer, progress: Progress) -> None:
            rows[trainer.training.seed].append(dict(progress.row))

        torch.manual_seed(seeds[0])
        try:
            train_together(trainers, after_epoch)
        except DivergedError as error:
            for member in error.members:
                rows[seeds[member]].append({"epoch": trainers[member].epoch + 1})
    for trainer, tokens in zip(trainers, inputs, strict=True):
        if trainer.epoch == epochs:
            rows[trainer.training.seed][-1] |= look(trainer.encoder, tokens)
    return pd.concat(
        [pd.DataFrame(own).assign(task=task, attention=attention, seed=seed) for seed, own in rows.items()]
    )


Block = tuple[str, str, tuple[int, ...]]


def registered() -> list[Block]:
    """Return task, attention and seeds of all blocks, in the order in which they are trained."""
    groups = [SEEDS[i : i + AT_ONCE] for i in range(0, len(SEEDS), AT_ONCE)]
    return [
        (task, attention, seeds)
        for task in TASKS
        for attentions in ((TOP, MATCHED, HALF), (STRAIGHT, FULL))
        for seeds in groups
        for attention in attentions
    ]


def file_of(folder: Path, block: Block) -> Path:
    """Return where a block's table is."""
    task, attention, seeds = block
    return folder / f"{task}-{attention}-{seeds[0]}-to-{seeds[-1]}.parquet"


def run_study(folder: Path, primary: bool) -> None:
    """Train the blocks that have no table."""
    torch.set_num_threads(1)
    refuse_used(SEEDS, "concentration")
    folder.mkdir(parents=True, exist_ok=True)
    if (HERE / "concentration" / "epochs.parquet").exists():
        unpack(HERE / "concentration", folder)
    for block in registered():
        file = file_of(folder, block)
        if file.exists() or (primary and block[0] not in PRIMARY):
            continue
        clock = time.process_time()
        table = train(*block)
        seconds = time.process_time() - clock
        write(table.assign(core_seconds=seconds / AT_ONCE), file)
        print(time.strftime("%H:%M"), file.stem, f"has ended, {seconds:.0f} s of a core.", flush=True)


def write(table: pd.DataFrame, file: Path) -> None:
    """Write a table at once or not at all, in float32."""
    part = file.with_suffix(".part")
    wide = table.select_dtypes("float64").columns
    table.astype(dict.fromkeys(wide, "float32")).to_parquet(part, index=False, compression="zstd")
    os.replace(part, file)


def pack(folder: Path, out: Path) -> None:
    """Join the blocks' tables, and what is packed already, into one table."""
    out.mkdir(parents=True, exist_ok=True)
    tables = [pd.read_parquet(file) for block in registered() if (file := file_of(folder, block)).exists()]
    packed = out / "epochs.parquet"
    earlier = [pd.read_parquet(packed)] if packed.exists() else []
    table = pd.concat([*tables, *earlier]).drop_duplicates(["task", "attention", "seed", "epoch"])
    write(table, packed)
    print(f"{packed}: {len(runs_of(table))} of {len(TASKS) * len(ATTENTIONS) * len(SEEDS)} runs.")


def runs_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return the first row of each run."""
    return table.drop_duplicates(["task", "attention", "seed"])


def unpack(folder: Path, out: Path) -> None:
    """Part the packed table into one a block."""
    out.mkdir(parents=True, exist_ok=True)
    table = pd.read_parquet(folder / "epochs.parquet")
    for block in registered():
        task, attention, seeds = block
        own = table[(table["task"] == task) & (table["attention"] == attention) & table["seed"].isin(seeds)]
        if len(runs_of(own)) == len(seeds):
            write(own, file_of(out, block))


def areas(table: pd.DataFrame) -> pd.DataFrame:
    """Return ln of the mean training loss over all epochs: a row per task and seed, a column per attention."""
    trained = table[table["epoch"] > 0]
    runs = trained.groupby(["task", "attention", "seed"])["train_loss"]
    whole = runs.count() == EPOCHS
    return np.log(runs.mean().where(whole)).unstack("attention")


def differences(area: pd.DataFrame) -> pd.DataFrame:
    """Return every attention's area less that of top-5 and of full attention: mean and t-interval over seeds."""
    rows = []
    for task, own in area.groupby("task", sort=False):
        there = own.dropna(axis=1, how="all")
        pairs = [(name, less) for less in (TOP, FULL) for name in ATTENTIONS if name != less]
        for attention, less in (pair for pair in pairs if set(pair) <= set(there.columns)):
            change = (there[attention] - there[less]).dropna().to_numpy(np.float64)
            found = t_interval(change) if len(change) > 1 else UNKNOWN
            facts = {"task": task, "attention": attention, "less": less, "pairs": len(change)}
            rows.append({**facts, "estimate": found.estimate, "low": found.low, "high": found.high})
    return pd.DataFrame(rows)


def said(found: Interval) -> str:
    """Return what an interval of ln areas says.

    Example:
        >>> [said(Interval(x, x - 0.1, x + 0.1)) for x in (-0.5, 0.0, 0.2, 0.5)]
        ['faster', 'alike', 'slower', 'slower']
    """
    if found.low > -LITTLE and found.high < LITTLE:
        return "alike"
    if found.low > 0:
        return "slower"
    return "faster" if found.high < 0 else "cannot tell"


def answer(expected: str, found: Interval) -> str:
    """Return whether an interval is as an explanation expects, against it, or neither.

    Within a quarter is against "slower" and "faster". Against "alike" is an interval beyond a quarter.

    Example:
        >>> answer("slower", Interval(0.3, 0.1, 0.5)), answer("alike", Interval(0.3, 0.1, 0.5))
        ('as expected', 'cannot tell')
    """
    found_to_be = said(found)
    if found_to_be == expected:
        return "as expected"
    if expected == "alike":
        beyond = found.low > LITTLE or found.high < -LITTLE
        return "contradicted" if beyond else "cannot tell"
    return "cannot tell" if found_to_be == "cannot tell" else "contradicted"


def explanations(table: pd.DataFrame) -> pd.DataFrame:
    """Return, by task and explanation, what the intervals say of each thing that it expects."""
    rows = []
    for row in table[table["less"] == TOP].to_dict("records"):
        found = Interval(row["estimate"], row["low"], row["high"])
        facts = {"task": row["task"], "attention": row["attention"], "found": said(found)}
        rows += [
            {**facts, "explanation": name, "expected": expected, "answer": answer(expected, found)}
            for name, expectations in EXPLANATIONS.items()
            if (expected := expectations.get(row["attention"]))
        ]
    return pd.DataFrame(rows)


def missing_runs(table: pd.DataFrame) -> dict[tuple[str, str], int]:
    """Return how many runs of each task and attention have no table."""
    counts = runs_of(table).groupby(["task", "attention"]).size().to_dict()
    return {(task, name): len(SEEDS) - int(counts.get((task, name), 0)) for task in TASKS for name in ATTENTIONS}


def judge(records: Path, out: Path) -> None:
    """Write what the registration asks of the attentions of which all runs of a task are there."""
    table = pd.read_parquet(records / "epochs.parquet")
    missing = missing_runs(table)
    for (task, attention), count in missing.items():
        if count:
            print(f"{task}, {attention}: {count} runs are missing, no comparison. Go on: concentration.py run")
    whole = table[[not missing[key] for key in zip(table["task"], table["attention"], strict=True)]]
    found = differences(areas(whole)) if len(whole) else pd.DataFrame()
    if not len(found):
        return
    answers = explanations(found)
    last = whole[whole["epoch"] == EPOCHS]
    moments = whole[whole["epoch"].isin([0, EPOCHS])]
    measured = moments.groupby(["task", "attention", "epoch"], sort=False)[["dispersion", "concentration"]].mean()
    learnt = last.groupby(["task", "attention"], sort=False)[["train_accuracy", "holdout_accuracy"]].mean()
    out.mkdir(parents=True, exist_ok=True)
    found.to_csv(out / "differences.csv", index=False, float_format="%.6g")
    answers.to_csv(out / "verdicts.csv", index=False)
    measured.reset_index().to_csv(out / "moments.csv", index=False, float_format="%.6g")
    learnt.reset_index().to_csv(out / "accuracy.csv", index=False, float_format="%.6g")
    print(found.to_string(index=False, float_format="{:.3f}".format))
    print(answers.to_string(index=False))
    for task in unlearnt(learnt):
        print(f"{task}: no attention learns it, so it says nothing of speed.")
    runs = runs_of(table)
    print(f"{len(runs)} runs have ended, {runs['core_seconds'].sum() / 3600:.2f} core hours.")


def unlearnt(accuracy: pd.DataFrame) -> Iterator[str]:
    """Return the tasks on which no attention comes a tenth of the way from the shortcut to 100%."""
    for task, best in accuracy["train_accuracy"].groupby("task", sort=False).max().items():
        floor = find_task(str(task)).shortcut[0]
        if best < floor + LEARNT * (1 - floor):
            yield str(task)


def power(mean: float, deviation: float, seeds: int, studies: int = 20_000) -> dict[str, float]:
    """Return how often each word of :func:`said` comes, of simulated studies with normal differences."""
    drawn = np.random.default_rng(0).normal(mean, deviation, (studies, seeds))
    words = [said(t_interval(values)) for values in drawn]
    return {word: words.count(word) / studies for word in ("faster", "alike", "slower", "cannot tell")}


def show_power() -> None:
    """Print the table of the registration."""
    print("| true difference | sd over seeds | faster | alike | slower | cannot tell |")
    print("|---|---|---|---|---|---|")
    for mean in (0.0, 0.1, 0.3, 0.6):
        for deviation in (0.1, 0.2, 0.3):
            chances = power(mean, deviation, len(SEEDS), 4000)
            told = " | ".join(f"{chance:.0%}" for chance in chances.values())
            print(f"| {mean:.2f} | {deviation} | {told} |")


def main() -> None:
    """Show the power, run, pack, unpack or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("power")
    runs = parts.add_parser("run")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--primary", action="store_true", help="even-pairs and missing-duplicate alone")
    for name in ("pack", "unpack"):
        moving = parts.add_parser(name)
        moving.add_argument("folder", type=Path)
        moving.add_argument("out", type=Path)
    judging = parts.add_parser("judge")
    judging.add_argument("records", type=Path)
    judging.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.part == "power":
        show_power()
    elif options.part == "run":
        run_study(options.folder, options.primary)
    elif options.part == "judge":
        judge(options.records, options.out)
    else:
        {"pack": pack, "unpack": unpack}[options.part](options.folder, options.out)


if __name__ == "__main__":
    main()
