"""Write a copy of a model with weights rounded to nearest: ``python docs/quantised.py MODEL COPY BITS``.

MODEL is a run's folder, or hf:PATH; COPY the file or the folder to write. Matrices alone are rounded, but for
embeddings: each row in groups of 64 numbers, a group in steps of its largest number / (2^(BITS - 1) - 1).
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

from semdiag_models import read_checkpoint
from semdiag_models.checkpoint import write_checkpoint

GROUP = 64


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a matrix to nearest, group by group."""
    groups = [group.float() for group in weight.split(GROUP, dim=1)]
    steps = [group.abs().amax(1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1) for group in groups]
    parts = [(group / step).round() * step for group, step in zip(groups, steps, strict=True)]
    return torch.cat(parts, 1).to(weight.dtype)


def copy(model: str, target: str, bits: int) -> None:
    """Write the copy."""
    if not model.startswith("hf:"):
        found = read_checkpoint(Path(model) / "last.pt")
        state = {
            name: rounded(tensor, bits) if tensor.ndim == 2 and "embedding" not in name else tensor
            for name, tensor in found.state.items()
        }
        write_checkpoint(Path(target), replace(found, state=state))
        return
    import transformers

    source = Path(model.removeprefix("hf:"))
    language_model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for part in language_model.modules():
            if isinstance(part, torch.nn.Linear) and part is not language_model.get_output_embeddings():
                part.weight.copy_(rounded(part.weight, bits))
    language_model.save_pretrained(target)
    for file in source.glob("*token*"):
        shutil.copy(file, target)


if __name__ == "__main__":
    copy(sys.argv[1], sys.argv[2], int(sys.argv[3]))
