"""A compact trainer for encoders with full, banded, block-local and top-k attention."""

from semdiag_models.attention.selection import ATTENTIONS, AttentionKind
from semdiag_models.checkpoint import Checkpoint, read_checkpoint, sha256, weights_sha256, write_checkpoint
from semdiag_models.config import ListOpsTrees, ModelConfig, TextSource, TrainingConfig
from semdiag_models.encoder import AttentionCore, Encoder
from semdiag_models.reading import InputError
from semdiag_models.run_folder import open_run, open_seed_runs, run_name, train_run, train_seed_runs
from semdiag_models.step import draw_data
from semdiag_models.sweeps.grid import configure
from semdiag_models.tasks import TASKS, Task, Text, find_task, open_text
from semdiag_models.training import DivergedError, Trainer

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
