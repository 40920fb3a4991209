"""Tiny random models of transformers, and their inputs."""

import pytest
import torch
from indexers_by_hand import LENGTH, SIZES


@pytest.fixture
def tiny():
    """Call with a family of transformers and what is its own: a random model, its biases too."""
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")

    def build(family, **own):
        if not hasattr(transformers, f"{family}Config"):
            pytest.skip(f"this transformers has no {family}")
        torch.manual_seed(3)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **own})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith(("router.bias", "correction_bias")):
                    tensor.normal_(0, 0.1)
                elif "gate.weight" in name or "router.weight" in name:
                    tensor.normal_(0, 0.05)
        return model

    return build


@pytest.fixture
def batch():
    """Six texts; the first is padded on the left, the fourth on the right."""
    draw = torch.Generator().manual_seed(5)
    mask = torch.ones(6, LENGTH, dtype=torch.int64)
    mask[0, :5] = mask[3, 12:] = 0
    return {"input_ids": torch.randint(1, 64, (6, LENGTH), generator=draw), "attention_mask": mask}
