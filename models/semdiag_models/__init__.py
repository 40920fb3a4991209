"""A compact trainer for encoders with full, banded, block-local and top-k attention."""

from semdiag_models.attention.kinds import ATTENTIONS, AttentionKind
from semdiag_models.checkpoint import Checkpoint, read_checkpoint, sha256, weights_sha256, write_checkpoint
from semdiag_models.data import draw_data
from semdiag_models.encoder import AttentionCore, Encoder
from semdiag_models.errors import InputError
from semdiag_models.model_config import ModelConfig
from semdiag_models.recipe import configure
from semdiag_models.run_folder import open_run, run_name, train_run
from semdiag_models.seed_runs import open_seed_runs, train_seed_runs
from semdiag_models.tasks import TASKS, Task, Text, find_task, open_text
from semdiag_models.training import DivergedError, Trainer
from semdiag_models.training_config import ListOpsTrees, TextSource, TrainingConfig

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
