"""A compact trainer for encoders with full, banded, local-block, top-k and other sparse attention."""

from importlib import import_module
from typing import TYPE_CHECKING

from semdiag_files import InputError

if TYPE_CHECKING:
    from semdiag_models.checkpoint import Checkpoint, read_checkpoint, sha256, weights_sha256, write_checkpoint
    from semdiag_models.config import ListOpsTrees, ModelConfig, TextSource, TrainingConfig
    from semdiag_models.kinds import ATTENTIONS, AttentionKind
    from semdiag_models.model import AttentionCore, Encoder
    from semdiag_models.run_folder import open_run, open_seed_runs, run_name, train_run, train_seed_runs
    from semdiag_models.tasks import TASKS, Task, configure, draw_data, find_task
    from semdiag_models.text import Text, open_text
    from semdiag_models.train import DivergedError, Trainer

# Imported on first use, from the first that has the name: the command line must not wait for torch.
_HOMES = "config", "kinds", "model", "checkpoint", "tasks", "text", "train", "run_folder"

__all__ = [
    # architecture
    "ATTENTIONS", "AttentionCore", "AttentionKind", "Encoder", "ModelConfig",
    # tasks
    "TASKS", "ListOpsTrees", "Task", "Text", "TextSource", "find_task", "open_text",
    # training
    "DivergedError", "Trainer", "TrainingConfig", "configure", "draw_data", "open_run", "run_name", "train_run",
    "open_seed_runs", "train_seed_runs",
    # checkpoints
    "Checkpoint", "read_checkpoint", "sha256", "weights_sha256", "write_checkpoint",
    # errors
    "InputError",
]  # fmt: skip


def __getattr__(name: str) -> object:
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(f"semdiag_models.{home}"), name):
            return getattr(module, name)
    raise AttributeError(f"module 'semdiag_models' has no attribute {name!r}")
