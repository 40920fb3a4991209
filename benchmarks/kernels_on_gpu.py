"""Row statistics by kernels on a GPU: differences from the CPU, times beside flash attention and the plain path.

    python benchmarks/kernels_on_gpu.py --check --time --out OUT [--device cpu]

With --device cpu, the checks run in Triton's interpreter at toy sizes and the times say nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import torch.nn.functional as F
from going_on import going_on, leave

from semdiag.mathematics import row_statistics as rows
from semdiag.mathematics.kernels import row_kernels
from semdiag.mathematics.row_statistics import RowStatistics, row_statistics

FOUND: dict[str, Any] = {}
AWAY: dict[str, float] = {}  # largest differences of the last case


def by_kernels(tile: row_kernels.Tile | None = None, **call: Any) -> RowStatistics:
    """Return the statistics from the kernels, wherever the call is."""

    def instead(
        scores: rows.Scores, selected: object, top: int, sinks: torch.Tensor | None, received: bool
    ) -> object:
        return row_kernels.kernel_rows(scores, top, sinks, received, tile)

    return _with(instead, call)


def plainly(**call: Any) -> RowStatistics:
    return _with(rows._strip_rows, call)


def _with(path: Callable[..., object], call: dict[str, Any]) -> RowStatistics:
    kept, refusal = rows._strip_rows, rows.kernels.refusal
    try:
        rows._strip_rows, rows.kernels.refusal = path, lambda *_: "this path was asked for"  # type: ignore[assignment]
        return row_statistics(**call)
    finally:
        rows._strip_rows, rows.kernels.refusal = kept, refusal


def masks(batch: int, heads: int, length: int, keys: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield arguments of every kind of mask."""
    draw = torch.Generator().manual_seed(3)
    place = torch.arange(length)[:, None] + keys - length
    near = (place - torch.arange(keys)).abs()
    yield "none", {}
    yield "causal", {"causal": True, "first_query": keys - length}
    yield "window", {"allowed": (near < 9)[None, None], "causal": True, "first_query": keys - length}
    ends = torch.randint(1, keys, (batch,), generator=draw)
    padding = torch.arange(keys) < ends[:, None]
    queries = torch.arange(length) < ends[:, None]
    yield "padding", {"allowed": padding[:, None, None], "queries": queries}
    yield "causal and padding", {"allowed": padding[:, None, None], "queries": queries, "causal": True}
    segments = (torch.arange(keys) // 13 == place // 13)[None, None]
    yield "segments", {"allowed": segments}
    dense = torch.rand(batch, heads, length, keys, generator=draw) < 0.4
    yield "dense", {"allowed": dense, "queries": queries}
    bias = torch.randn(batch, heads, length, keys, generator=draw)
    yield "bias", {"bias": bias, "causal": True, "first_query": keys - length}
    yield (
        "slopes",
        {"bias": -0.1 * torch.arange(heads)[:, None, None] * near[None].float(), "allowed": dense[:, :1]},
    )
    yield "soft cap", {"softcap": 5.0, "causal": True, "first_query": keys - length}
    sinks = torch.randn(heads, generator=draw)
    yield "sinks", {"sinks": sinks, "causal": True, "first_query": keys - length}
    drawn = torch.randint(-1, length, (batch, heads, max(3, length // 5)), generator=draw)
    yield "not finite", {"allowed": dense, "causal": True, "first_query": keys - length}
    yield "zeros", {"queries": queries}
    yield "drawn", {"places": drawn, "causal": True, "first_query": keys - length, "allowed": dense}


def inputs(batch: int, heads: int, length: int, keys: int, width: int, dtype: torch.dtype, whole: bool) -> Any:
    """Return queries and keys; of small whole numbers, every score is exact and ties abound."""
    draw = torch.Generator().manual_seed(width)
    shapes = (batch, heads, length, width), (batch, heads // 2 or 1, keys, width)
    if whole:
        return (torch.randint(-1, 2, shape, generator=draw).to(dtype) for shape in shapes)
    return (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)


def bound(q: torch.Tensor, k: torch.Tensor, scale: float, call: dict[str, Any]) -> torch.Tensor:
    """Return the largest error of a row's scores that ``kernel_rows`` states, (B, H, R) float64."""
    width, narrow = q.shape[3], q.dtype != torch.float32
    count = (2 if narrow else 6) * width * 2.0**-23
    share = count / (1 - count) + (0 if narrow else 3 * 2.0**-22)
    keys = k.double().abs().repeat_interleave(q.shape[1] // k.shape[1], 1)
    size = abs(scale) * (q.double().abs() @ keys.mT).amax(-1)
    if "places" in call:
        size = size.gather(2, call["places"].clamp(min=0))
    bias = call["bias"].abs().max().item() if "bias" in call else 0.0
    return size * (share + 2.0**-22) + 2.0**-22 * bias + 2.0**-21 * (call.get("softcap") or 0.0)


def differences(got: RowStatistics, want: RowStatistics, error: torch.Tensor, exact: bool) -> dict[str, Any]:
    """Return the largest differences, each as a multiple of what is allowed: at most 1 is right."""
    found: dict[str, Any] = {}
    real, fine = want.keys > 0, want.non_finite == 0  # a score that is not finite may be NaN or infinite

    def compare(name: str, allowed: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        a, b = (getattr(statistics, name).double().cpu() for statistics in (got, want))
        away = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
        away = away if rows is None else away.where(rows, 0.0)
        found[name] = (away / allowed).nan_to_num(torch.inf).max().item()
        AWAY[name] = away.max().item()

    rounding = 2.0**-22 * (1 + want.maximum.double().abs().where(real & fine, 0.0)) + 2.0**-20
    allowed = error + rounding
    for name in ("maximum", "minimum", "log_sum_exp"):
        compare(name, allowed, fine)
    spread = (want.maximum - want.minimum).double().where(real & fine, 0.0)
    compare("entropy", allowed * 2 * (1 + spread) + 2.0**-18, fine)
    compare("top", allowed[..., None], fine[..., None])
    share = 2 * allowed.where(real & fine, 0.0).sum(2, keepdim=True) + 2.0**-20 * (1 + want.received.double())
    compare("received", share)
    counts = ("keys", "kept", "non_finite", "load")
    found["counts"] = 9.0 * any(not torch.equal(getattr(got, n).cpu(), getattr(want, n)) for n in counts)
    if exact and fine.all():
        counts = ("top_keys", "top_load")
        found["ties"] = 9.0 * any(not torch.equal(getattr(got, n).cpu(), getattr(want, n)) for n in counts)
    else:  # keys may change places where scores differ by less than the errors
        near = want.top[..., :-1] - want.top[..., 1:] <= 2 * allowed[..., None]
        near[..., 1:] |= near[..., :-1].clone()
        other = got.top_keys.cpu() != want.top_keys
        found["keys of ranks"] = 9.0 * bool((other & ~near & fine[..., None]).any())
    return found


def moved(call: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in call.items()}


def check_cases(toy: bool) -> list[tuple[torch.dtype, int, bool, int]]:
    """Return types, widths, whether numbers are whole, and numbers of masks."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    if toy:  # the interpreter takes seconds for each
        kinds = (f32, 16, False), (bf16, 16, True), (f16, 80, False), (f32, 32, True)
        return [(*kinds[(n + n // 4) % 4], n) for n in range(14)]
    every = [(kind, 64, n) for kind in (f32, bf16, f16) for n in range(14)]
    every += [(kind, width, n) for kind in (f32, bf16) for width in (16, 128, 256) for n in (0, 1, 6, 7)]
    every += [(kind, width, n) for kind in (f32, f16) for width in (80, 96) for n in (0, 1, 6, 7)]
    return [(kind, width, whole, n) for kind, width, n in every for whole in (False, True)]


def check(device: str, part: int = 0, parts: int = 1) -> None:
    """Compare the kernels with the CPU path in float64, by type, width and mask."""
    toy, wrong = device == "cpu", 0
    cases = check_cases(toy)
    for dtype, width, whole, number in cases[2 * part :: 2 * parts] + cases[2 * part + 1 :: 2 * parts]:
        batch, heads, length, keys, top = 2, 4, 333, 777, 32
        if toy:  # the second kind in parts of a head and a tile of rows
            batch, length, keys = ((1, 19, 37), (2, 13, 70))[number % 2]
            heads, top, row_kernels._MEMORY = 2, 3, (2**29, 9000)[number % 2]
        mask, more = list(masks(batch, heads, length, keys))[number]
        name = f"{str(dtype)[6:]} {width}{' whole' if whole else ''}, {mask}"
        q, k = inputs(batch, heads, length, keys, width, dtype, whole)
        q = 0 * q if mask == "zeros" else q
        if mask == "not finite":
            q[:, :, 2], k[:, :, 5, 1] = torch.nan, torch.inf
        call = {"scale": 0.25 if whole else width**-0.5, "top": top, "received": True} | more
        found = {"failed": 99.0}
        with going_on(name):
            error = bound(q.nan_to_num(0, 0, 0), k.nan_to_num(0, 0, 0), call["scale"], call)
            want = plainly(q=q.double(), k=k.double(), **call)
            got = by_kernels(q=q.to(device), k=k.to(device), **moved(call, device))
            exact = whole and not {"bias", "softcap"} & more.keys()
            found = differences(got, want, error, exact)
        large = {n: round(v, 3) for n, v in found.items() if v > 1}
        largest = max(found.items(), key=lambda item: item[1])
        FOUND[name] = {"share": largest[1], **AWAY}
        wrong += bool(large)
        with going_on(f"{name} is within its bound"):
            assert not large, large
        away = " ".join(f"{n} {a:.1e}" for n, a in AWAY.items())
        print(
            f"{name}: {largest[1]:.3f} of the bound ({largest[0]}); {away}",
            f"WRONG {large}" * bool(large),
            flush=True,
        )
    print(f"check, part {part}: {wrong} wrong", flush=True)


def spread(options: argparse.Namespace, kind: str, parts: int = 12) -> None:
    """Run the parts at once, because Triton takes seconds to compile each variant, and keep what they found."""
    outs = [options.out / f"{kind}-{part}" for part in range(parts)]
    command = [sys.executable, __file__, f"--{kind}", "--device", options.device]
    each = [
        subprocess.Popen([*command, "--out", str(out), "--part", f"{n}/{parts}"]) for n, out in enumerate(outs)
    ]
    for process, out in zip(each, outs, strict=True):
        with going_on(out.name):
            assert process.wait() == 0, "see above"
        if (out / "kernels.json").exists():
            FOUND.update(json.loads((out / "kernels.json").read_text()))


def milliseconds(run: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median wall time between synchronisations, after two runs that are not counted."""
    times = []
    for _ in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(run: Callable[[], object], device: str) -> float:
    """MiB above what was there before."""
    if device != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    wait(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


TIMED: dict[str, tuple[torch.dtype, int, int, int, dict[str, Any]]] = {
    "float32, top 32": (torch.float32, 12, 12, 32, {}),
    "float32, top 32, received": (torch.float32, 12, 12, 32, {"received": True}),
    "float32": (torch.float32, 12, 12, 0, {}),
    "bfloat16": (torch.bfloat16, 12, 12, 0, {}),
    "bfloat16, top 32": (torch.bfloat16, 12, 12, 32, {}),
    "bfloat16, 32 heads on 8, top 16": (torch.bfloat16, 32, 8, 16, {}),
}
_TILE = row_kernels.Tile
TRIED = [
    *(("float32, top 32", tile) for tile in (_TILE(64, 64, 4, 2), _TILE(128, 64, 8, 2, 128))),
    *(("float32, top 32", tile) for tile in (_TILE(128, 64, 8, 2), _TILE(128, 32, 8, 2, 128))),
    *(("bfloat16, top 32", tile) for tile in (_TILE(64, 64, 4, 3), _TILE(128, 64, 8, 3, 128))),
    *(("bfloat16", tile) for tile in (_TILE(64, 64, 4, 3), _TILE(128, 64, 8, 3, 128))),
]


def timed_call(name: str, length: int, device: str) -> dict[str, Any]:
    """Return the arguments of a causal call of heads of width 64."""
    dtype, heads, key_heads, top, more = TIMED[name]
    draw = torch.Generator(device).manual_seed(0)
    q = torch.randn(1, heads, length, 64, generator=draw, device=device).to(dtype)
    k = torch.randn(1, key_heads, length, 64, generator=draw, device=device).to(dtype)
    return {"q": q, "k": k, "scale": 0.125, "top": top, "causal": True} | more


def warm(device: str, part: int, parts: int) -> None:
    """Compile what is timed."""
    cases = [(length, name, None) for length in (2048, 8192, 16384) for name in TIMED]
    for length, name, tile in (cases + [(8192, name, tile) for name, tile in TRIED])[part::parts]:  # type: ignore[operator]
        try:
            by_kernels(tile, **timed_call(name, length, device))
            wait(device)
        except Exception as error:
            print(f"warm {name} {length} {tile}: {str(error)[-200:]}", flush=True)


def times(device: str) -> None:
    """Time 12 causal heads of width 64, and 32 heads on 8 key heads as in a model of 1 billion parameters."""
    toy = device == "cpu"
    run, repeats = (by_kernels, 1) if toy else (row_statistics, 5)
    for length in (24,) if toy else (2048, 8192, 16384):
        for name, (_, heads, key_heads, *_) in [*TIMED.items()][:2] if toy else TIMED.items():
            with going_on(f"{length:,}, {name}"):
                call = timed_call(name, length, device)
                cell = {"kernels": milliseconds(lambda: run(**call), device, repeats)}  # noqa: B023
                cell["MiB"] = peak(lambda: run(**call), device)  # noqa: B023
                half, keys = call["q"].bfloat16(), call["k"].bfloat16().repeat_interleave(heads // key_heads, 1)
                flash = lambda: F.scaled_dot_product_attention(half, keys, keys, is_causal=True)  # noqa: B023, E731
                cell["flash"] = milliseconds(flash, device, repeats)
                if heads == 12 and (length < 16384 or name in ("float32, top 32", "bfloat16")):
                    cell["plain"] = milliseconds(lambda: plainly(**call), device, 1)  # noqa: B023
                    cell["plain MiB"] = peak(lambda: plainly(**call), device)  # noqa: B023
                FOUND[f"{length}, {name}"] = cell
                print(f"{length:,} {name}: " + ", ".join(f"{n} {v:.2f}" for n, v in cell.items()), flush=True)
    for name, tile in [] if toy else TRIED:
        try:
            call = timed_call(name, 8192, device)
            by_kernels(tile, **call)
            spent = on_device(lambda: by_kernels(tile, **call))  # noqa: B023
            FOUND[f"{name}, {tuple(tile)}"] = own = {key: ms for ms, _, key in spent if key.startswith("_")}
            print(f"8,192 {name}, {tuple(tile)}: {own}", flush=True)
        except Exception as error:
            print(f"{name} {tuple(tile)}: {str(error)[-200:]}", flush=True)
    if not toy:
        profile(device)


def on_device(run: Callable[[], object]) -> list[tuple[float, int, str]]:
    """Return what the device spends on each kernel: ms, times, name."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        run()
        wait("cuda")
    events = ((event.self_device_time_total / 1000, event.count, event.key[:60]) for event in seen.key_averages())
    return sorted(events, reverse=True)


def profile(device: str) -> None:
    """Print what each kernel takes, and a run's host time."""
    for name in ("float32, top 32", "bfloat16", "bfloat16, top 32"):
        call = timed_call(name, 8192, device)
        row_statistics(**call)
        for spent, count, key in on_device(lambda: row_statistics(**call))[:9]:  # noqa: B023
            print(f"{name}: {spent:.3f} ms, {count} times, {key}", flush=True)
        start = time.perf_counter()
        row_statistics(**call)
        print(f"{name}: the host is free after {1000 * (time.perf_counter() - start):.2f} ms", flush=True)
        wait(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU: a dry run, no measurement of a GPU"
    FOUND["device"] = f"torch {torch.__version__}, {name}"
    print(FOUND["device"], flush=True)
    steps: dict[str, Callable[[], None]] = {}
    if options.part:
        torch.set_num_threads(1)
        steps["part"] = lambda: (warm if options.warm else check)(
            options.device, *map(int, options.part.split("/"))
        )
    else:
        apart = options.device == "cuda"
        if options.check:
            steps["check"] = lambda: spread(options, "check") if apart else check(options.device)
        if options.time and apart:
            steps["warm"] = lambda: spread(options, "warm")
        if options.time:
            steps["time"] = lambda: times(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, step in steps.items():
        start = time.perf_counter()
        with going_on(name):
            step()
        FOUND[f"seconds of {name}"] = round(time.perf_counter() - start, 1)
        (options.out / "kernels.json").write_text(json.dumps(FOUND, indent=1))
    if options.check and not options.part:
        shares = [value["share"] for value in FOUND.values() if isinstance(value, dict) and "share" in value]
        print(f"check: {sum(s > 1 for s in shares)} wrong of {len(shares)}")
    print({key: value for key, value in FOUND.items() if key.startswith("seconds")}, flush=True)
    leave()


if __name__ == "__main__":
    main()
