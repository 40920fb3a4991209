"""What a capture, a k-sweep and the monitor cost a model of 1.1 billion parameters on a GPU.

    python benchmarks/capture_on_gpu.py --time --out FOLDER      # numbers, about two minutes
    python benchmarks/capture_on_gpu.py --check --out FOLDER     # captured numbers against the CPU's
    python benchmarks/capture_on_gpu.py --check --time --device cpu --small    # that the script runs

A Llama with random weights in bfloat16: 16 layers, 32 heads on 8 key heads of width 64, batch 1. Times are wall
times between synchronisations, medians after one run that is not counted; memory is the peak beyond what was held.
*waits*: where torch's check of synchronisations (set_sync_debug_mode) finds one inside the forward pass.
"""

import argparse
import importlib
import json
import os
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from going_on import FAILED, going_on, leave
from transformers import LlamaConfig, LlamaForCausalLM

import semdiag
from semdiag.capturing.adapters.hugging_face import attends_by_interface
from semdiag.measuring.calls.monitor import Monitor
from semdiag.questions.k_sweep.measure import KSweepPlan

FOUND: dict[str, Any] = {}


def llama(device: str, small: bool, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """The model of issue 55, or one of its shape that a CPU runs in a second."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    large = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32_000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if small else {}
    heads = heads or {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**(sizes if small else large), **heads, max_position_embeddings=32_768)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def tokens(device: str, model: LlamaForCausalLM, samples: int, length: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(model.config.vocab_size, (samples, length), generator=draw).to(device)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Median wall time in ms, and peak memory in GiB beyond what is held."""
    times, peak = [], 0.0
    for _ in range(repeats + 1):
        synchronise(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        start = time.perf_counter()
        run()
        synchronise(device)
        times.append(1000 * (time.perf_counter() - start))
        peak = max(peak, (torch.cuda.max_memory_allocated() - held) / 2**30 if device == "cuda" else 0.0)
    return statistics.median(times[1:] or times), peak


def part(name: str) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Run a part so that its failure does not cost the rest, and keep what it found."""

    def wrapped(run: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        def tried(*arguments: Any) -> None:
            start = time.perf_counter()
            with going_on(name):
                FOUND[name] = run(*arguments)
            if name in FAILED:
                FOUND[name] = {"failed": FAILED[name]}
            print(f"{name} ({time.perf_counter() - start:.1f} s): {json.dumps(FOUND[name])}", flush=True)

        return tried

    return wrapped


def captured(model: LlamaForCausalLM, ids: torch.Tensor, k: int = 16) -> Any:
    with torch.no_grad(), semdiag.capture(model, k=k) as calls:
        model(ids, use_cache=False, logits_to_keep=1)
    return calls


@part("waits")
def waits(model: LlamaForCausalLM, device: str, length: int) -> dict[str, Any]:
    """Where the forward pass of a capture, and of a monitored step, waits for the device."""
    if device != "cuda":
        return {}
    ids, places = tokens(device, model, 1, length), {}

    def noted(run: Callable[[], object]) -> dict[str, int]:
        seen: Counter[str] = Counter()

        def show(message: Any, category: Any, filename: str, line: int, *more: Any) -> None:
            frames = [f for f in traceback.extract_stack() if "/semdiag/" in f.filename]
            file, at = (frames[-1].filename, frames[-1].lineno) if frames else (filename, line)
            where = f"{Path(file).name}:{at}"
            seen[where] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            before, warnings.showwarning = warnings.showwarning, show
            try:
                torch.cuda.set_sync_debug_mode("warn")
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
                warnings.showwarning = before
        return dict(seen)

    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
        places["forward"] = noted(lambda: model(ids, use_cache=False, logits_to_keep=1))
        with semdiag.capture(model, k=16):
            places["capture"] = noted(lambda: model(ids, use_cache=False, logits_to_keep=1))
    model.train()
    with Monitor(model, every=1, queries=128):
        model(ids, use_cache=False)
        places["monitor"] = noted(lambda: model(ids, use_cache=False))
    model.eval()
    return places


@part("capture")
def capture(model: LlamaForCausalLM, device: str, lengths: list[int], repeats: int) -> dict[str, Any]:
    """A forward pass, and one that is captured."""
    rows = {}
    for length in lengths:
        ids = tokens(device, model, 1, length)

        def forward(ids: torch.Tensor = ids) -> None:
            with torch.no_grad():
                model(ids, use_cache=False, logits_to_keep=1)

        try:
            plain = timed(forward, device, 3 * repeats)
            seen = timed(lambda ids=ids: captured(model, ids), device, repeats)
            none = timed(lambda ids=ids: captured(model, ids, 0), device, repeats)
        except Exception as error:
            rows[str(length)] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        numbers = {"forward ms": plain[0], "capture ms": seen[0], "ratio": seen[0] / plain[0], "k=0 ms": none[0]}
        numbers |= {"forward GiB": plain[1], "capture GiB": seen[1]}
        rows[str(length)] = {name: round(value, 3) for name, value in numbers.items()}
        print(length, rows[str(length)], flush=True)
    return rows


@part("parts of a capture")
def parts_of(model: LlamaForCausalLM, device: str, length: int) -> dict[str, Any]:
    """Time on the device and on the host of a captured forward pass, by operation."""
    from torch.profiler import ProfilerActivity, profile

    ids = tokens(device, model, 1, length)
    captured(model, ids)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as profiled:
        captured(model, ids)
        synchronise(device)
    times = profiled.key_averages()
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    top = sorted(times, key=lambda event: -getattr(event, own))[:16]
    return {event.key[:70]: [event.count, round(getattr(event, own) / 1000, 2)] for event in top}


@part("k-sweep")
def k_sweep(model: LlamaForCausalLM, device: str, samples: int, length: int) -> dict[str, Any]:
    """A sweep in Python with two kinds × two k, in forwards of all samples."""
    ids = tokens(device, model, samples, length)
    plan = KSweepPlan(rerun=True, ks=(64, 256) if length > 512 else (4, 8), kinds=("topk", "window"))

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    plain, _ = timed(forward, device, 2)
    start = time.perf_counter()
    found = semdiag.k_sweep(model, ids, plan=plan, batch_size=samples)
    first = 1000 * (time.perf_counter() - start)
    swept, peak = timed(lambda: semdiag.k_sweep(model, ids, plan=plan, batch_size=samples), device, 0)
    mass = found.sweep[(found.sweep["quantity"] == "weight_kept") & (found.sweep["layer"] == -1)]
    return {
        "forward ms": round(plain, 1), "first ms": round(first, 1), "sweep ms": round(swept, 1),
        "forwards": round(swept / plain, 1), "GiB": round(peak, 2),
        "queries": int(mass["queries"].max()), "remarks": found.remarks["text"].tolist()[:5],
    }  # fmt: skip


@part("monitor")
def monitor(model: LlamaForCausalLM, device: str, samples: int, length: int, repeats: int) -> dict[str, Any]:
    """A training step, and one in which the monitor looks at 256 rows a head; steps take turns."""
    ids = tokens(device, model, samples, length)
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    plain, looks, ended = [], [], []
    for _ in range(repeats + 1):
        plain.append(timed(step, device, 0)[0])
        watcher = Monitor(model, every=1000, queries=256 // samples).start()
        looks.append(timed(step, device, 0)[0])
        start = time.perf_counter()
        watcher.stop()
        ended.append(1000 * (time.perf_counter() - start))
    every = Monitor(model, every=5, queries=256 // samples).start()
    several = timed(lambda: [step() for _ in range(10)], device, 1)[0] / 10
    every.stop()
    model.eval()
    one, look = statistics.median(plain[1:]), statistics.median(looks[1:])
    return {
        "step ms": round(one, 2), "with a look ms": round(look, 2), "look over step": round(look / one - 1, 4),
        "end ms": round(statistics.median(ended), 1), "rows": int(watcher.table["rows"].max()),
        "every=5, share": round(several / one - 1, 4),
    }  # fmt: skip


@part("check")
def check(device: str, length: int) -> dict[str, Any]:
    """Largest differences of what is captured, swept and monitored on the device from the CPU's."""
    model = llama("cpu", True, torch.float32)
    ids = tokens("cpu", model, 2, length)
    there = llama("cpu", True, torch.float32).to(device)
    differences: dict[str, Any] = {}

    def compare(name: str, one: Any, other: Any) -> None:
        one, other = one.dropna(how="all", axis=1), other.dropna(how="all", axis=1)
        numbers = [c for c in one if one[c].dtype.kind == "f"]
        same = len(one) == len(other) and all(one[c].equals(other[c]) for c in one if c not in numbers)
        finite = [(one[c] - other[c]).abs().where(lambda x: x < float("inf")).max() for c in numbers]
        differences[name] = [same, float(max(finite, default=0.0))]

    for marked in (False, True):
        real = torch.ones_like(ids)
        real[1, length // 2 :] = 0
        calls = []
        for each, place in ((model, "cpu"), (there, device)):
            options = {"attention_mask": real.to(place)} if marked else {}
            with torch.no_grad(), semdiag.capture(each, k=8) as seen:
                each(ids.to(place), use_cache=False, **options)
            calls.append(seen)
        one, other = calls
        for name in ("dispersion", "separation", "loads"):
            compare(f"{name}, padding {marked}", getattr(one, name)([1, 4, 8]), getattr(other, name)([1, 4, 8]))
        compare(f"entropy, padding {marked}", one.entropy(), other.entropy())
        compare(f"residual, padding {marked}", one.residual[["layer", "mask"]], other.residual[["layer", "mask"]])
        differences[f"residuals, padding {marked}"] = [x.residual["residual"].max() for x in calls]
    sweeps = [semdiag.k_sweep(each, ids.to(place)).sweep for each, place in ((model, "cpu"), (there, device))]
    compare("sweep", *sweeps)
    tables = []
    for each, place in ((model, "cpu"), (there, device)):
        with Monitor(each.train(), every=1, k=[4], queries=16) as watcher:
            for _ in range(3):
                each(ids.to(place), use_cache=False)
        tables.append((watcher.table, watcher.heads))
    compare("monitor's layers", tables[0][0], tables[1][0])
    compare("monitor's heads", tables[0][1], tables[1][1])
    return differences


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, small = arguments.device, arguments.small or arguments.device == "cpu"
    place = torch.cuda.get_device_name() if device == "cuda" else f"CPU, load {os.getloadavg()[0]:.1f}"
    print(f"torch {torch.__version__}, {place}", flush=True)
    # the package may be a folder on the path, not installed
    importlib.import_module("semdiag.measuring.measure").version = lambda name: ""
    if arguments.check:
        check(device, 48 if small else 300)
    if arguments.time:
        model = llama(device, small)
        print(f"without modes: {attends_by_interface(model)}", flush=True)
        lengths = [32, 64] if small else [1024, 4096, 16_384]
        waits(model, device, lengths[0])
        capture(model, device, lengths, 1 if small else 3)
        parts_of(model, device, lengths[1])
        monitor(model, device, 2, 64 if small else 2048, 2 if small else 4)
        k_sweep(model, device, 4, 64 if small else 4096)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        found = {"device": place, "torch": str(torch.__version__), **FOUND}
        (arguments.out / "capture_on_gpu.json").write_text(json.dumps(found, indent=1))
    leave()


if __name__ == "__main__":
    main()
