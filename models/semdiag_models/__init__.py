"""A compact trainer for encoders with full, banded, local-block, top-k and other sparse attention."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semdiag_models.attention import ATTENTIONS, AttentionKind
    from semdiag_models.checkpoint import Checkpoint, read_checkpoint, sha256, weights_sha256, write_checkpoint
    from semdiag_models.config import ListOpsTrees, ModelConfig, TextSource, TrainingConfig
    from semdiag_models.encoder import AttentionCore, Encoder
    from semdiag_models.reading import InputError
    from semdiag_models.run_folder import open_run, open_seed_runs, run_name, train_run, train_seed_runs
    from semdiag_models.tasks import TASKS, Task, Text, configure, draw_data, find_task, open_text
    from semdiag_models.training import DivergedError, Trainer

# Imported on first use: the command line reads the options in ``config``, and must not wait for torch.
_HOME = {
    "attention": ("ATTENTIONS", "AttentionKind"),
    "checkpoint": ("Checkpoint", "read_checkpoint", "sha256", "weights_sha256", "write_checkpoint"),
    "config": ("ListOpsTrees", "ModelConfig", "TextSource", "TrainingConfig"),
    "encoder": ("AttentionCore", "Encoder"),
    "reading": ("InputError",),
    "run_folder": ("open_run", "open_seed_runs", "run_name", "train_run", "train_seed_runs"),
    "tasks": ("TASKS", "Task", "Text", "configure", "draw_data", "find_task", "open_text"),
    "training": ("DivergedError", "Trainer"),
}
_MODULES = {name: module for module, names in _HOME.items() for name in names}

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
    if name not in _MODULES:
        raise AttributeError(f"module 'semdiag_models' has no attribute {name!r}")
    found = getattr(import_module(f"semdiag_models.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
