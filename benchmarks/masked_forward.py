"""What a masked and a captured forward cost on a CPU, beside a plain one.

    python benchmarks/masked_forward.py [2048,4096]

A model of SmolLM2-135M's shape with random weights (30 layers, 9 heads on 3 key heads of width 64), one text, one
thread, no gradient: CPU seconds and the process's peak memory so far. About eight minutes for both lengths.
"""

import resource
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import semdiag
from semdiag import TopK, Window, sparsify


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Print the ratios of each length."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for length in map(int, (sys.argv[1:] or ["2048,4096"])[0].split(",")):
        tokens = torch.randint(49152, (1, length))

        def masked(rule: TopK, tokens: torch.Tensor = tokens) -> None:
            with sparsify(model, keep=rule):
                model(tokens)

        def captured(tokens: torch.Tensor = tokens) -> None:
            with semdiag.capture(model, k=16):
                model(tokens)

        with torch.no_grad():
            plain = min(seconds(lambda t=tokens: model(t)) for _ in range(2))  # type: ignore[misc]
            ways = {
                "Window(256, sinks=4)": lambda m=masked: m(Window(256, sinks=4)),
                "TopK(128)": lambda m=masked: m(TopK(128)),
                "capture(k=16)": captured,
            }
            print(f"{length:,} tokens: plain {plain:.1f} s")
            for name, run in ways.items():
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
                print(f"  {name}: {seconds(run) / plain:.2f} of it; peak {peak:.2f} GiB before", flush=True)


if __name__ == "__main__":
    main()
