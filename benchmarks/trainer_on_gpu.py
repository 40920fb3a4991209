"""The trainer on a GPU: agreement with the CPU, times of a step, and full ListOps by the paper's settings.

    python benchmarks/trainer_on_gpu.py --check --out OUT              # a minute
    python benchmarks/trainer_on_gpu.py --time [--compile] --out OUT   # two minutes; compilation takes another one
    python benchmarks/trainer_on_gpu.py --listops FOLDER --minutes 8 --out OUT    # goes on where it stopped

With ``--device cpu`` the sizes are tiny and say that the code runs, nothing else.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from going_on import FAILED, going_on, leave
from training_step import Step

from semdiag_models import ModelConfig, Trainer, TrainingConfig, configure, find_task, open_run, train_run
from semdiag_models.cuda_steps import Steps
from semdiag_models.fast_attention import largest
from semdiag_models.train import find_device

SEEDS = (153476998, 235510766, 205084180)  # the paper's first
ATTENTIONS = {"full": None, "topk": 5}


class Bench:
    """What the parts share: the device, whether it is the CPU, and what was found."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.small = device, device.type == "cpu"
        self.found: dict[str, Any] = {"torch": torch.__version__, "device": device.type}
        if not self.small:
            self.found["device"] = torch.cuda.get_device_name(device)

    def tell(self, name: str, value: Any) -> None:
        """Print a result and keep it."""
        self.found[name] = value
        print(f"{name}: {value}", flush=True)

    def part(self, run: Callable[[], None]) -> None:
        """Run a part; a failure costs the others nothing."""
        start = time.perf_counter()
        with going_on(run.__name__):
            run()
        print(f"  ({run.__name__}: {time.perf_counter() - start:.1f} s)", flush=True)
        if not self.small:
            torch.cuda.empty_cache()

    def trainer(
        self,
        attention: str,
        length: int,
        blocks: int,
        device: torch.device | None = None,
        seed: int = 1,
        batches: int = 4,
        training: dict[str, Any] | None = None,
        **model: Any,
    ) -> Trainer:
        """A trainer of parity with batches of 25."""
        config = ModelConfig(3, 2, length, attention, ATTENTIONS.get(attention, 5), blocks=blocks, **model)
        sizes = {"train_samples": 25 * batches, "holdout_samples": 50, "seed": seed, "exact": True}
        run = TrainingConfig("parity", length, **{"epochs": 4, **sizes, **(training or {})})
        return Trainer(config, run, device or self.device)

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Median wall time of a call, after three that are not counted."""
        times = []
        for _ in range(repeats + 3):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:])

    def wait(self) -> None:
        """Wait for the device."""
        if not self.small:
            torch.cuda.synchronize()

    # --- check

    def agreement(self) -> None:
        """Ten steps in float64 without dropout: largest relative distance of a parameter from the CPU's."""
        torch.set_default_dtype(torch.float64)
        try:
            for attention, length, blocks in (
                ("full", 40, 5),
                ("topk", 40, 5),
                ("topk", 300, 2),
                ("banded", 40, 2),
            ):
                length, blocks = (12, 1) if self.small else (length, blocks)
                ends = {}
                for way in ("cpu", "eager", "graph"):
                    place = torch.device("cpu") if way == "cpu" else self.device
                    trainer = self.trainer(attention, length, blocks, place, dropout=0.0, batches=10)
                    trainer.encoder.train()
                    ends[way] = self._ten(Steps([trainer]), way == "graph" and not self.small)
                for way in ("eager", "graph"):
                    far = max(
                        float(((a - b).abs() / b.abs().max()).max())
                        for a, b in zip(ends[way], ends["cpu"], strict=True)
                    )
                    self.tell(f"agreement {attention} {length} {way} (at most 1e-12)", far)
            alone = []
            for seed in (1, 2, 3):
                trainer = self.trainer("topk", 12, 2, seed=seed, dropout=0.0, batches=10)
                trainer.encoder.train()
                alone.append(self._ten(Steps([trainer]), not self.small))
            trainers = [self.trainer("topk", 12, 2, seed=seed, dropout=0.0, batches=10) for seed in (1, 2, 3)]
            steps = Steps(trainers)
            steps._encoder.train()
            together = self._ten(steps, not self.small, [250 * i for i in range(3)])
            far = max(
                float((whole[i] - one).abs().max())
                for i in range(3)
                for whole, one in zip(together, alone[i], strict=True)
            )
            self.tell("agreement three seeds at once (at most 1e-12)", far)
        finally:
            torch.set_default_dtype(torch.float32)

    def _ten(self, steps: Steps, graph: bool, starts: list[int] | None = None) -> list[torch.Tensor]:
        """Parameters after ten steps on the samples in their order."""
        steps._rate.fill_(0.1)
        if graph:
            steps._capture(25)
        for n in range(10):
            batch = torch.arange(25 * n, 25 * n + 25, device=steps._device)[None]
            batch = batch if starts is None else batch + torch.tensor(starts, device=steps._device)[:, None]
            if graph:
                steps._batch.copy_(batch)
                steps._graph.replay()
            else:
                steps._step(batch)
        return [parameter.detach().cpu().clone() for parameter in steps._encoder.parameters()]

    def selection(self) -> None:
        """The kernel of the largest scores against torch's, both without ties."""
        for length, dtype in ((600, torch.float32), (37, torch.float64), (3000, torch.float32)):
            scores = torch.randn(4, 50, length, dtype=dtype, device=self.device)
            ours, theirs = largest(scores, 5), scores.topk(5, -1)
            self.tell(
                f"largest of {length} the same", all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            )

    def resumed(self) -> None:
        """Four epochs with dropout, and two and two: the same weights and history, to the bit."""
        for attention in ATTENTIONS:
            for options in ({}, {"optimizer": "adam", "learning_rate": 0.001}):
                ends = []
                with tempfile.TemporaryDirectory() as folder:
                    for name, parts in (("whole", (4,)), ("parts", (2, 4))):
                        for epochs in parts:
                            given = self.trainer(attention, 40, 1, training={**options, "epochs": epochs})
                            place, resume = Path(folder, name), epochs > parts[0]
                            run = open_run(
                                place, given.config, given.training, self.device, resume=resume, overwrite=False
                            )
                            train_run(place, run, {})
                        ends.append((run.encoder.state_dict(), run.history["holdout_loss"]))
                equal = all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])
                said = options.get("optimizer", "sgd")
                self.tell(f"resumed bit for bit, {attention} {said}", equal and ends[0][1] == ends[1][1])

    def ways(self) -> None:
        """Every kind of attention and way of training runs, and its loss falls or is finite."""
        kinds = ("full", "banded", "block", "topk", "bottomk", "random", "redrawn", "lsh", "routing")
        kinds += ("indexer", "moba")
        ways: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in kinds]
        ways += [("full", {"optimizer": "adamw", "learning_rate": 0.001})]
        ways += [("topk", {"frozen": ("qk",), "weight_decay": 0.1}), ("topk", {"fresh_samples": True})]
        for kind, options in ways:
            with going_on(f"{kind} {options}"):
                trainer = self.trainer(kind, 40, 1, training={"epochs": 2, **options})
                trainer.run(lambda progress: None)
                self.tell(f"two epochs {kind} {options}", trainer.history["train_loss"])

    # --- time

    def steps(self) -> None:
        """Milliseconds of a step of ours, and of a textbook's, eager and as a graph."""
        for length, blocks in ((12, 1),) if self.small else ((40, 5), (600, 10)):
            for attention in ATTENTIONS:
                name = f"25 x {length}, {blocks} blocks, {attention}"
                self.tell(f"step ms {name}", self._step_ms(attention, length, blocks))
                if self.small:
                    continue
                with self.device:
                    step = Step(
                        ModelConfig(3, 2, length, attention, ATTENTIONS[attention], blocks=blocks), self.device
                    )
                self.tell(f"textbook eager ms {name}", 1000 * self.seconds(step, 20))
                with going_on(f"textbook as a graph {name}"):
                    graph = torch.cuda.CUDAGraph()
                    for parameter in step.parameters:
                        parameter.grad = None
                    with torch.cuda.graph(graph):
                        step()
                    self.tell(f"textbook as a graph ms {name}", 1000 * self.seconds(graph.replay, 20))

    def _step_ms(self, attention: str, length: int, blocks: int, **training: Any) -> float:
        batches = 2 if self.small else 40
        trainer = self.trainer(attention, length, blocks, batches=batches, training=training)
        steps = Steps([trainer])
        return 1000 * self.seconds(lambda: steps.epoch(lambda trainer: None), 5) / batches

    def parts(self) -> None:
        """Milliseconds of the parts of a step with long inputs: attention of one block, forward and backward."""
        from semdiag_models.fast_attention import dense_attention, selected_attention

        length = 30 if self.small else 600
        q, k, v = (torch.randn(25, 1, length, 64, device=self.device, requires_grad=True) for _ in range(3))
        grad = torch.randn(25, 1, length, 64, device=self.device)
        scores = torch.randn(25, length, length, device=self.device)
        chosen = largest(scores, 5)[1][:, None]
        runs: dict[str, Callable[[], object]] = {
            "largest": lambda: largest(scores, 5),
            "torch.topk": lambda: scores.topk(5, -1),
            "scores": lambda: torch.bmm(q[:, 0], k[:, 0].mT),
            "full": lambda: dense_attention(q, k, v, 0.1, None, 0.01),
            "selected": lambda: selected_attention(q, k, v, 0.1, chosen, 0.01),
        }
        for name, run in runs.items():
            self.tell(f"ms of {name}", 1000 * self.seconds(run, 10))
            if name in ("full", "selected"):
                both = lambda run=run: torch.autograd.grad(run(), (q, k, v), grad)  # noqa: E731
                self.tell(f"ms of {name} and its gradient", 1000 * self.seconds(both, 10))

    def at_once(self) -> None:
        """Milliseconds of a step of one seed, and of ten at once."""
        for attention in ATTENTIONS:
            batches, length, blocks = (2, 12, 1) if self.small else (40, 40, 5)
            times = []
            for count in (1, 10):
                steps = Steps(
                    [self.trainer(attention, length, blocks, seed=n, batches=batches) for n in range(count)]
                )
                times.append(1000 * self.seconds(lambda s=steps: s.epoch(lambda trainer: None), 5) / batches)
            self.tell(f"step ms of one and ten seeds {attention} (ten at most three times one)", times)

    def epoch(self) -> None:
        """Seconds of an epoch of full ListOps, evaluation included; the first one captures."""
        for attention in ATTENTIONS:
            model, training = self.listops(attention, SEEDS[0])
            trainer = Trainer(model, replace(training, epochs=6), self.device)
            trainer.run(lambda progress: None)
            self.tell(f"epoch of ListOps s {attention}", trainer.history["seconds"])

    def compiled(self) -> None:
        """Milliseconds of a compiled step with long inputs, and how long compilation takes."""
        for attention in ATTENTIONS:
            start = time.perf_counter()
            self.tell(f"compiled step ms 25 x 600, 10 blocks, {attention}",
                      self._step_ms(attention, 600, 10, compiled=True))  # fmt: skip
            self.tell(f"compilation and timing s {attention}", time.perf_counter() - start)

    # --- ListOps

    def listops(self, attention: str, seed: int) -> tuple[ModelConfig, TrainingConfig]:
        """ListOps as in the paper: PAD is a key and in the mean; 600 positions, for full attention, too."""
        chosen = {"attention": attention, "k": ATTENTIONS[attention], "pad_as_token": True, "seed": seed}
        sizes = {"train_samples": 50, "holdout_samples": 25, "blocks": 1, "epochs": 2} if self.small else {}
        model, training = configure(find_task("listops"), {**chosen, **sizes})
        return replace(model, length=600), training

    def train_listops(self, folder: Path, minutes: float, compiled: bool) -> None:
        """Train seeds in turn, full and top-5, each with all its epochs, until the time is over."""
        deadline = time.monotonic() + 60 * minutes
        for seed in SEEDS[: 1 if self.small else None]:
            for attention in ATTENTIONS:
                model, training = self.listops(attention, seed)
                training = replace(training, compiled=compiled and not self.small)
                place = folder / f"listops-{attention}-seed-{seed}"
                run = open_run(
                    place, model, training, self.device, resume=(place / "last.pt").exists(), overwrite=False
                )

                def after(progress: Any, place: Path = place) -> None:
                    row = progress.row
                    print(f"{place.name} {json.dumps({k: round(v, 4) for k, v in row.items()})}", flush=True)
                    if time.monotonic() > deadline:
                        raise TimeoutError

                try:
                    train_run(place, run, {"command": "benchmarks/trainer_on_gpu.py --listops"}, after)
                except TimeoutError:
                    print(f"The time is over: {place} holds epoch {run.epoch}.", flush=True)
                    return
                finally:
                    self.found[place.name] = run.history


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--compile", action="store_true", help="time compiled steps, too; or train ListOps so")
    parser.add_argument("--listops", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    bench = Bench(find_device(arguments.device))
    if arguments.check:
        for part in (bench.selection, bench.agreement, bench.resumed, bench.ways):
            bench.part(part)
    if arguments.time:
        parts = [bench.steps, bench.parts, bench.at_once, bench.epoch]
        for part in parts + ([bench.compiled] if arguments.compile else []):
            bench.part(part)
    if arguments.listops:
        train = lambda: bench.train_listops(arguments.listops, arguments.minutes, arguments.compile)  # noqa: E731
        bench.part(train)
    arguments.out.mkdir(parents=True, exist_ok=True)
    kinds = [name for name in ("check", "time", "listops") if getattr(arguments, name)]
    path = arguments.out / f"trainer-{'-'.join(kinds)}.json"
    path.write_text(json.dumps(bench.found | {"failed": FAILED}, indent=1), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
