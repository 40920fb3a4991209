"""From a path to a model with everything known about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing import paper_code
from semdiag_models import Encoder, InputError, Text, TrainingConfig, draw_data, find_task, read_checkpoint, sha256
from semdiag_models.checkpoint import FORMAT, read_plain


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode and where it comes from.

    Attributes:
        path: as the user named it.
        sha256: of the file.
        module: the encoder.
        source: ``semdiag`` or ``paper code``.
        snapshot: ``initialisation``, ``last``, ``best`` or ``epoch N``.
        task: the task's name; None if unknown.
        seed: of the run; None if unknown.
        epoch: finished epochs; None if unknown.
        training: data and optimisation of the run; None if unknown.
        history: one list per column, one entry per epoch; empty if unknown.
        provenance: versions, command, device of the training run.
    """

    path: str
    sha256: str
    module: Encoder
    source: str
    snapshot: str
    task: str | None = None
    seed: int | None = None
    epoch: int | None = None
    training: TrainingConfig | None = None
    history: dict[str, list[float]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def default_inputs(self, samples: int, seed: int) -> tuple[Tensor, Tensor, str]:
        """Inputs to measure on when the user names none.

        The run's own held-out samples, regenerated from its seed; for a model whose training data are
        unknown, fresh samples of its task.

        Args:
            samples: how many; of a text with fewer windows, all.
            seed: of fresh samples.

        Returns:
            Tokens (N, L), labels (N,), and a description of where they come from.

        Raises:
            InputError: if there are fewer samples, the task is unknown, or the run's text is not there any more.
        """
        config = self.module.config
        if self.training is not None:
            # How many windows a text has is nobody's choice: of a small one, all are taken.
            if samples > self.training.holdout_samples and self.training.text is None:
                raise InputError(
                    f"{self.path} has {self.training.holdout_samples} held-out samples. Got --samples {samples}."
                )
            holdout = draw_data(self.training, config.length, config.pad_id)[1]
            source = "the run's own held-out samples"
            if self.training.text is not None:
                source += f" (overlapping windows of {self.training.text.holdout_file or self.training.text.file})"
            return holdout.tokens[:samples], holdout.labels[:samples], source
        if self.task is None:
            raise InputError(f"The task of {self.path} is unknown: name its inputs with --inputs FILE.")
        length = min(find_task(self.task).recipe.length, config.length)
        fresh = TrainingConfig(self.task, length, 1, seed, samples, 1)
        tokens, labels = draw_data(fresh, config.length, config.pad_id)[0]
        return (
            tokens,
            labels,
            f"fresh samples of {self.task} (seed {seed}), not the model's own held-out data",
        )

    def text_inputs(self, path: Path, samples: int, seed: int) -> tuple[Tensor, Tensor, str]:
        """Windows of a text that the user names, for a model that was trained on one.

        Args:
            path: a UTF-8 text file; the model's own tokenizer cuts it into pieces.
            samples: how many windows, drawn at random; all if there are fewer.
            seed: of the draw.

        Returns:
            Tokens (N, L), labels (N,), and a description of where they come from.

        Raises:
            InputError: if the model reads no text, or the file is none, or its lines are too short.
        """
        if self.training is None or self.training.text is None:
            raise InputError(f"{self.path} was not trained on text: --inputs takes token ids (.npy, .npz or .pt).")
        generator = torch.Generator().manual_seed(seed)
        text = Text(self.training.text)
        tokens, labels = text.draw_from(path, samples, self.training.length, generator)
        return tokens, labels, f"{len(tokens)} windows of {path} (given)"


def load(path: str | Path, config: Mapping[str, Any] | None = None) -> LoadedModel:
    """Load a checkpoint: one of semdiag's, a run's folder, or one of the paper's released code.

    Args:
        path: a ``.pt`` file, or a run's folder (its ``last.pt``).
        config: for the paper's code only: its configuration, where the file name does not say it.

    Returns:
        The model in evaluation mode on the CPU.

    Raises:
        InputError: if the file is missing, not a checkpoint, holds code, or does not fit its configuration.
    """
    file = Path(path)
    if (file / "last.pt").exists():
        file /= "last.pt"
    content = read_plain(file)
    if paper_code.recognised(content):
        encoder, description = paper_code.build(file, content, config)
        return LoadedModel(str(path), sha256(file), encoder, source="paper code", **description)
    if (
        isinstance(content, dict)
        and content.get("format") != FORMAT
        and all(map(torch.is_tensor, content.values()))
    ):
        raise InputError(
            f"{path} is a bare state dict of an unknown model. Supported are semdiag checkpoints and those of the "
            "paper's released code."
        )
    checkpoint = read_checkpoint(file)
    snapshot = {0: "initialisation"}.get(checkpoint.epoch, f"epoch {checkpoint.epoch}")
    if file.stem in ("last", "best"):
        snapshot = file.stem
    return LoadedModel(
        path=str(path),
        sha256=sha256(file),
        module=checkpoint.build(),
        source="semdiag",
        snapshot=snapshot,
        task=checkpoint.training.task_label,
        seed=checkpoint.training.seed,
        epoch=checkpoint.epoch,
        training=checkpoint.training,
        history=checkpoint.history,
        provenance=checkpoint.provenance,
    )
