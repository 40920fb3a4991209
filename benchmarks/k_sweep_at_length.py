"""Time and peak memory of ``semdiag k-sweep hf:PATH`` at several lengths of its inputs, beside a plain forward.

    python checkpoints/smollm2.py DIR
    python benchmarks/k_sweep_at_length.py hf:PATH --lengths 512,1024,2048,4096

Each length runs in a process of its own, on one thread, with random tokens: first one forward, then the command.
Time is CPU time; memory is the peak of the process (ru_maxrss), after a forward and in all.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch


def peak() -> float:
    """Peak memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run(model: str, length: int, samples: int, more: list[str]) -> None:
    """One length: print its numbers as JSON."""
    import semdiag
    from semdiag.commands.main import main as command

    torch.set_num_threads(1)
    loaded = semdiag.load(model)
    tokens = next(part.num_embeddings for part in loaded.module.modules() if isinstance(part, torch.nn.Embedding))
    ids = torch.randint(tokens, (samples, length), generator=torch.Generator().manual_seed(0))
    held = peak()
    with torch.no_grad():
        loaded.module(ids[:1, :32])
        start = time.process_time()
        loaded.module(ids[:1])
        forward = time.process_time() - start
    plain = peak()
    del loaded
    with tempfile.TemporaryDirectory() as folder:
        torch.save(ids, Path(folder) / "ids.pt")
        wanted = [
            "k-sweep",
            model,
            "--inputs",
            str(Path(folder) / "ids.pt"),
            "--batch-size",
            "1",
            "--json",
            "--quiet",
        ]
        start = time.process_time()
        sys.stdout.flush()
        sys.argv = ["semdiag", *wanted, "--figures", "none", "--out", str(Path(folder) / "out"), *more]
        try:
            command()
        except SystemExit as end:
            if end.code:
                raise
    numbers = {"forward s": forward, "k-sweep s": time.process_time() - start}
    numbers |= {"held GiB": held, "forward GiB": plain, "peak GiB": peak()}
    print("\n" + json.dumps({name: round(value, 2) for name, value in numbers.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--one", type=int, help="run this length in this process")
    options, more = parser.parse_known_args()
    if options.one:
        run(options.model, options.one, options.samples, more)
        return
    print("| tokens | forward s | k-sweep s | forwards | peak GiB of a forward | of the sweep |")
    print("|---|---|---|---|---|---|")
    for length in map(int, options.lengths.split(",")):
        same = [sys.executable, __file__, options.model, "--one", str(length), "--samples", str(options.samples)]
        done = subprocess.run([*same, *more], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {length} | failed: {done.stderr[-300:]} |")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        forward, swept = found["forward s"] * options.samples, found["k-sweep s"]
        cells = (forward, swept, swept / forward, found["forward GiB"], found["peak GiB"])
        print(f"| {length:,} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
