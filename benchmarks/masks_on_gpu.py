"""Real masks at length, beside a plain forward: time and peak memory; or their outputs against dense float64.

    python benchmarks/masks_on_gpu.py --check --time --out OUT [--device cuda] [--small]

The model has 1.1 billion parameters (16 layers, 32 heads on 8 key heads of width 64, bfloat16, random weights).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from going_on import FAILED, going_on, leave
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import semdiag
from semdiag import TopK, TopP, Window, sparsify
from semdiag.capturing import masked_attention
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.choices import choice_of
from semdiag.capturing.kept_keys import all_kept
from semdiag.capturing.rules import Rule

LONGEST = 25  # seconds after which the check begins nothing more: a kind of call takes 10 to 30 to compile
RULES: tuple[Rule, ...] = (
    TopK(16),
    Window(40, sinks=2),
    TopK(8, sinks=1, window=8),
    TopK([1, 2, 0, 7] * 2, sinks=1),
    TopK(2, block=16),
    TopP(0.9),
    TopK(2, block=16, query_block=64),
    TopK(8, shared="layer"),
)


def dense(call: AttentionCall, rule: Rule, q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
    """Return attention in float64 over the keys that sorted scores keep; equal ones keep the lower position."""
    shared, length = q.shape[1] // k.shape[1], k.shape[2]
    keys, values = (x.repeat_interleave(shared, 1) for x in (k, v))
    seen = torch.ones(*q.shape[:3], length, dtype=torch.bool, device=q.device)
    places = torch.arange(length, device=q.device)
    if call.causal:
        seen = seen & (places <= places[:, None])
    seen = seen if call.allowed is None else seen & call.allowed
    if (
        not isinstance(rule, TopK) or rule.query_block > 1
    ):  # the strips' keys, chosen on the CPU from float64 scores
        exact = replace(call, q=call.q.double().cpu(), k=call.k.double().cpu(), v=call.v.double().cpu())
        exact = replace(exact, allowed=None if call.allowed is None else call.allowed.cpu())
        found = all_kept(choice_of(rule, exact))
        kept = seen if found is None else found[0].to(q.device) & seen
        z = (q @ keys.mT * call.scale).masked_fill(~kept, -torch.inf)
        return z.softmax(-1).nan_to_num(0) @ values
    fixed = torch.zeros_like(seen)
    if rule.sinks:
        real = seen.any(1).any(1)
        fixed |= (real & (real.cumsum(-1) <= rule.sinks))[:, None, None]
    if rule.window:
        back = places[:, None] - places
        near = back.abs() < rule.window
        if rule.centred and not call.causal:
            near = (back <= rule.window // 2) & (back > rule.window // 2 - rule.window)
        fixed |= near
    counts = rule.k if isinstance(rule.k, list) else [rule.k] * q.shape[1]
    ranked = scores.masked_fill(~seen | fixed, -torch.inf)
    if rule.shared == "layer":
        ranked = ranked.softmax(-1).nan_to_num(0).mean(1, keepdim=True).expand_as(ranked)
        ranked = ranked.masked_fill(~seen, -torch.inf)
    if rule.block > 1:
        ranked = torch.nn.functional.pad(ranked, (0, -length % rule.block), value=-torch.inf)
        ranked = ranked.unflatten(-1, (-1, rule.block)).logsumexp(-1)
    rank = ranked.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    kept = rank < torch.tensor(counts, device=q.device)[:, None, None]
    kept = kept.repeat_interleave(rule.block, -1)[..., :length]
    kept = (kept | fixed) & seen
    kept = kept | (seen & ~kept.any(-1, keepdim=True))
    z = (q @ keys.mT * call.scale).masked_fill(~kept, -torch.inf)
    return z.softmax(-1).nan_to_num(0) @ values


def calls(device: str, dtype: torch.dtype, length: int) -> Iterator[tuple[str, AttentionCall]]:
    """Yield attention calls with grouped heads: causal, padded, and without a mask."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 64, generator=generator).to(device, dtype) for heads in (8, 2, 2))
    padding = torch.tensor([0, max(16, length // 80 * 16)])  # whole blocks of 16
    real = (torch.arange(length) >= padding[:, None]).to(device)[:, None, None]
    for name, allowed, causal in (("causal", None, True), ("padded", real, True), ("whole", None, False)):
        yield name, AttentionCall("", 0, q, k, v, 0.125, allowed, None, None, q, causal=causal)


def check(device: str, small: bool) -> list[dict[str, Any]]:
    """Return the largest differences from dense float64: of outputs, and of gradients relative to the largest."""
    length, rows, begun = (70 if small else 700), [], time.perf_counter()
    tables = [(torch.bfloat16, name, rule) for name in ("causal", "padded") for rule in RULES[4:]]
    flexible = [(torch.float32, "causal", RULES[1]), (torch.bfloat16, "padded", RULES[2])]
    flexible += [(torch.float32, "causal", RULES[0]), (torch.bfloat16, "causal", RULES[3])]
    others = [(torch.float32, name, rule) for name in ("padded", "whole") for rule in RULES]
    cases = [*tables, *flexible, *others]
    for dtype, name, rule in cases:
        if time.perf_counter() - begun > LONGEST:
            print("no time for", dtype, name, rule, flush=True)
            continue
        with going_on(f"{name}, {dtype}, {rule}"):
            rows.append(compared(device, dtype, dict(calls(device, dtype, length))[name], rule))
            print(name, rows[-1], flush=True)
    print("FlexAttention failed:", masked_attention.FAILED or "no", flush=True)
    return rows


def compared(device: str, dtype: torch.dtype, call: AttentionCall, rule: Rule) -> dict[str, Any]:
    """Return how far an attention and its gradients are from dense float64."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v))
    choice, failed = choice_of(rule, call), len(masked_attention.FAILED)
    flexible = masked_attention.fits_flex(choice, (q, k, v))
    start = time.perf_counter()
    output, _, close = masked_attention.attended(choice, (q, k, v))
    if len(masked_attention.FAILED) > failed:
        with going_on(f"FlexAttention, {rule}"):  # again, for its traceback
            masked_attention.flexible(choice, (q, k, v))
    direction = torch.randn(output.output.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (output.output * direction).sum().backward()
    seconds = time.perf_counter() - start
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = dense(call, rule, *exact, call.scores(torch.float64))
    (expected * direction).sum().backward()
    off = (output.output - expected).abs().amax(-1).flatten()
    slopes = [
        ((a.grad - b.grad).abs().amax() / b.grad.abs().amax()).item()
        for a, b in zip((q, k, v), exact, strict=True)
        if a.grad is not None and b.grad is not None
    ]
    return {
        "dtype": str(dtype), "rule": repr(rule), "flex": flexible and len(masked_attention.FAILED) < 2,
        "off": off.max().item(), "rows off": int((off > (2e-5 if dtype == torch.float32 else 2e-2)).sum()),
        "close": 0 if close is None else int(close), "gradients": slopes, "seconds": round(seconds, 2),
    }  # fmt: skip


def measure(run: Callable[[], object], device: str, repeats: int) -> dict[str, float]:
    """Return the median of wall times in ms after one run, and the peak of memory above its start, in GiB."""
    times, cuda = [], device == "cuda"
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
    return {"first": times[0], "ms": statistics.median(times[1:]), "GiB": peak}


def clock(device: str, small: bool) -> list[dict[str, Any]]:
    """Return times of forwards: plain, masked, captured."""
    sizes = (64, 2, 4, 2, 128, 100) if small else (2048, 16, 32, 8, 8192, 32_000)
    hidden, layers, heads, key_heads, inner, words = sizes
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        intermediate_size=inner, vocab_size=words, max_position_embeddings=16_384, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    rows: list[dict[str, Any]] = []
    for length in (64, 640) if small else (16_384, 4096, 1024):  # a kernel for long texts runs short ones, too
        ids = torch.randint(words, (1, length), generator=torch.Generator().manual_seed(0)).to(device)

        def forward(ids: Tensor = ids) -> None:
            with torch.no_grad():
                model(ids, logits_to_keep=1)

        def masked(rule: Rule) -> None:
            with sparsify(model, rule):
                forward()

        def captured() -> None:
            with semdiag.capture(model, k=16):
                forward()

        plain = 0.0
        runs: dict[str, Callable[[], object]] = {
            "forward": forward,
            "sparsify(Window(64))": lambda: masked(Window(64)),
            "sparsify(TopK(64))": lambda: masked(TopK(64)),
            "sparsify(TopP(0.9))": lambda: masked(TopP(0.9)),
            "sparsify(TopK(4, block=16))": lambda: masked(TopK(4, block=16)),
            "sparsify(TopK(1, block=64, query_block=64))": lambda: masked(TopK(1, block=64, query_block=64)),
        }
        runs |= {"capture(k=16)": captured} if length <= 4096 else {}
        for name, run in runs.items():
            with going_on(f"{length} tokens, {name}"):
                row = {"tokens": length, "what": name, **measure(run, device, 1 if small else 2)}
                plain = row["ms"] if name == "forward" else plain
                row["times"] = row["ms"] / plain if plain else None
                rows.append(row)
                print(row, flush=True)
    print("FlexAttention failed:", masked_attention.FAILED or "no", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    small = options.small or options.device == "cpu"
    found: dict[str, Any] = {"torch": torch.__version__}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    print(found, flush=True)
    for name, part in (("check", check), ("time", clock)):
        if vars(options)[name]:
            with going_on(name):
                found[name] = part(options.device, small)
    found["failures"] = FAILED
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "masks_on_gpu.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
