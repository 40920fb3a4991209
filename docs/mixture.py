"""Write the model that docs/commands/selections.md looks at: a tiny random DeepSeek-V3.2, and its inputs."""

import numpy as np
import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

config = DeepseekV32Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, n_shared_experts=1, moe_intermediate_size=16,
    n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,  # of 16 experts 4, from 2 of 4 groups
    index_topk=8, index_n_heads=4, index_head_dim=16,  # of the keys before a query 8
)  # fmt: skip
model = DeepseekV32ForCausalLM(config)
draw = np.random.default_rng(0)
with torch.no_grad():
    for _, tensor in sorted(model.named_parameters()):
        if tensor.ndim > 1:  # the others are scales and biases of norms
            tensor.copy_(torch.from_numpy(draw.normal(0, tensor.shape[-1] ** -0.5, tensor.shape)))
    for name, tensor in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.from_numpy(draw.normal(0, 0.05, tensor.shape)))
model.save_pretrained("mixture")

ids = torch.from_numpy(draw.integers(1, 64, (8, 32)))
mask = torch.ones_like(ids)
mask[0, :12] = 0  # the first sample is shorter, and padded on the left
torch.save({"input_ids": ids, "attention_mask": mask}, "tokens.pt")
