"""Load a model, with everything that is known about it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing import factories, paper_code, pretrained
from semdiag.capturing.attention_kinds import EXTERNAL_SOURCES
from semdiag.capturing.discovery import known_runs
from semdiag.capturing.hints import OF_YOUR_OWN, refuse_other_kinds
from semdiag.capturing.weights_watch import watched_weights
from semdiag_models import (
    Encoder,
    InputError,
    Text,
    TrainingConfig,
    draw_data,
    find_task,
    weights_sha256,
)
from semdiag_models.checkpoint import FORMAT, checkpoint_of, is_checkpoint, read_hashed
from semdiag_models.reading import read_json, require_memory


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """A model in evaluation mode, and where it comes from.

    Attributes:
        path: as the user named it.
        sha256: of the file; of a Hugging Face model's weight files; empty if there is none.
        module: the model; an encoder of semdiag_models, or any other.
        source: ``semdiag``, ``paper code``, ``hugging face``, ``factory``, ``module`` or ``python``.
        snapshot: ``initialisation``, ``last``, ``best``, ``epoch N`` or ``unknown``.
        task: the task's name; None if unknown.
        seed: of the run; None if unknown.
        epoch: finished epochs; None if unknown.
        training: data and optimisation of the run; None if unknown.
        history: one list per column, one entry per epoch; empty if unknown.
        provenance: versions, command and device of the training run.
        batches: inputs that came with the model; None if none did.
        weights_sha256: of the parameters alone, of semdiag's and the paper's checkpoints; else empty.
        recorded_weights: where such a hash is recorded, and which: in the file, in a manifest beside its folder.
        not_loaded: which weights the function that built it left out, in words; empty if none.
        tokenizers: those read so far, by folder; None: the model's own.
    """

    path: str
    sha256: str
    module: nn.Module
    source: str
    snapshot: str
    task: str | None = None
    seed: int | None = None
    epoch: int | None = None
    training: TrainingConfig | None = None
    history: dict[str, list[float]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    batches: Any = None
    weights_sha256: str = ""
    recorded_weights: dict[str, str] = field(default_factory=dict)
    not_loaded: str = ""
    tokenizers: dict[Path | None, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        known = ", ".join(str(part) for part in (self.task, self.snapshot) if part)
        parameters = sum(p.numel() for p in self.module.parameters())
        return f"LoadedModel {self.path} ({self.source}, {known}, {parameters:,} parameters)"

    @property
    def size(self) -> int:
        """Bytes of its parameters and buffers."""
        return sum(t.nbytes for t in (*self.module.parameters(), *self.module.buffers()))

    @property
    def external(self) -> bool:
        """Whether it was not made by semdiag or the paper's code, so that only its attention is known."""
        return self.source in EXTERNAL_SOURCES

    @property
    def contradicted_by(self) -> list[str]:
        """Where a different hash of the weights is recorded: ``file``, ``manifest``."""
        return [place for place, digest in self.recorded_weights.items() if digest != self.weights_sha256]

    @property
    def encoder(self) -> Encoder:
        """The model as an encoder of semdiag_models, all of whose parts are known.

        Raises:
            InputError: if it is another model; says what works on it.
        """
        if isinstance(self.module, Encoder):
            return self.module
        raise InputError(
            f"{self.path} is a {type(self.module).__name__}: this needs one of semdiag's encoders, all of "
            "whose parts are known. These work on any model: semdiag info, dispersion, separation, stability, "
            "mask-stability, k-sweep, overlap, compare, report, and check with --rule or --baseline."
        )

    def default_inputs(self, samples: int, seed: int) -> tuple[Tensor, Tensor, str]:
        """Return inputs to measure on when the user names none.

        These are the run's own held-out samples, regenerated from its seed; if the training data are unknown,
        fresh samples of its task.

        Args:
            samples: how many; all, if a text has fewer windows.
            seed: of fresh samples.

        Returns:
            Tokens (N, L), labels (N,), and a description of where they come from.

        Raises:
            InputError: if there are fewer samples, the task is unknown, the run's text is gone, or the model is no
                encoder of semdiag_models.
        """
        config = self.encoder.config
        if self.training is not None:
            # The user cannot know how many windows a text has: of a small one, all are taken.
            if samples > self.training.holdout_samples and self.training.text is None:
                raise InputError(
                    f"{self.path} has {self.training.holdout_samples} held-out samples; --samples must not be "
                    f"larger. Got --samples {samples}."
                )
            drawn = self.training.train_samples + self.training.holdout_samples
            require_memory(16 * drawn * config.length, f"Drawing the samples that {self.path} declares")
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
        """Return windows of the user's text, for a model that was trained on text.

        Args:
            path: a UTF-8 text file; the model's own tokenizer cuts it into pieces.
            samples: how many windows, drawn at random; all if there are fewer.
            seed: of the draw.

        Returns:
            Tokens (N, L), labels (N,), and a description of where they come from.

        Raises:
            InputError: if the model reads no text, the file is no text, or its lines are too short.
        """
        if self.training is None or self.training.text is None:
            raise InputError(f"{self.path} was not trained on text: --inputs takes token ids (.npy, .npz or .pt).")
        generator = torch.Generator().manual_seed(seed)
        text = Text(self.training.text)
        tokens, labels = text.draw_from(path, samples, self.training.length, generator)
        return tokens, labels, f"{len(tokens)} windows of {path} (given)"


def load(path: str | Path, config: Mapping[str, Any] | None = None, head: str = "auto") -> LoadedModel:
    """Load a model: a checkpoint, a Hugging Face folder, or what the user's function builds.

    Args:
        path: a ``.pt`` file of semdiag or of the paper's released code, or a run's folder (its ``last.pt``);
            ``hf:DIRECTORY`` (offline, safetensors; DIRECTORY may lie in an installed package, as
            PACKAGE/FOLDER); or ``package.module:function``, which is imported and called and returns a module,
            or a module and its inputs.
        config: for checkpoints of the paper's code only: the configuration that the file name does not tell.
        head: of a Hugging Face model: ``auto`` for the one that its configuration names, ``none`` for the body
            alone.

    Returns:
        The model in evaluation mode on the CPU. Torch's random state is left as it was.

    Raises:
        InputError: if it is missing, none of these, contains code, is incomplete, or does not fit its
            configuration.
    """
    with torch.random.fork_rng(devices=[]):  # modules draw initial weights before loading
        return _load(path, config, head)


def load_all(
    models: Iterable[str | Path | LoadedModel], config: Mapping[str, Any] | None, head: str = "auto"
) -> list[LoadedModel]:
    """Load several models with :func:`load`; loaded ones pass through."""
    loaded = [model if isinstance(model, LoadedModel) else load(model, config, head) for model in models]
    if config is not None and not any(model.source == "paper code" for model in loaded):
        raise InputError(
            f"--config describes checkpoints of the paper's code, but {loaded[0].path} is not one: leave out "
            "--config."
        )
    return loaded


def _load(path: str | Path, config: Mapping[str, Any] | None, head: str) -> LoadedModel:
    spec = str(path)
    if head not in pretrained.HEADS:
        raise InputError(f"head is {' or '.join(pretrained.HEADS)}. Got {head!r}.")
    if spec.startswith(pretrained.PREFIX):
        model, digest, versions = pretrained.build(spec, head)
        return LoadedModel(spec, digest, model, "hugging face", "unknown", provenance=versions)
    if factories.recognised(spec):
        with watched_weights() as weights:
            model, batches = factories.build(spec)
        source = "python" if isinstance(model, Encoder) else "factory"
        return LoadedModel(
            spec, "", factories.in_evaluation_mode(model), source, snapshot="unknown", batches=batches,
            not_loaded=weights.described(model),
        )  # fmt: skip
    return _load_checkpoint(path, config)


def describe(model: LoadedModel) -> dict[str, Any]:
    """Return what is known of a model's architecture."""
    parameters = sum(p.numel() for p in model.module.parameters())
    if not model.external:
        return {**model.encoder.config.to_dict(), "parameters": parameters}
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.module.parameters()})
    facts: dict[str, Any] = {"class": type(model.module).__name__, "dtype": ", ".join(kinds)}
    if model.source == "hugging face":
        written: dict[str, Any] = model.module.config.to_diff_dict()  # type: ignore[union-attr, operator]
        facts |= {name: value for name, value in written.items() if isinstance(value, int | float | str)}
    return facts | {"parameters": parameters}


def _load_checkpoint(path: str | Path, config: Mapping[str, Any] | None) -> LoadedModel:
    file = Path(path)
    if (file / "last.pt").exists():
        file /= "last.pt"
    refuse_other_kinds(file, known_runs())
    content, digest = read_hashed(file)
    if paper_code.recognised(content):
        encoder, description = paper_code.build(file, content, config)
        return LoadedModel(
            str(path),
            digest,
            encoder,
            source="paper code",
            weights_sha256=weights_sha256(encoder.state_dict()),
            **description,
        )
    if not is_checkpoint(content):
        if isinstance(content, dict) and all(map(torch.is_tensor, content.values())):
            raise InputError(
                f"{path} holds weights without their model (a state dict). Write a file mymodel.py whose function "
                f'build() makes the model, calls model.load_state_dict(torch.load("{path}", weights_only=True)) '
                "and returns it. Then name mymodel:build instead of the file."
            )
        raise InputError(
            f"{path} is not a semdiag checkpoint (no format entry {FORMAT!r}). "
            f"Make one with: semdiag train even-pairs --attention topk --k 5; {OF_YOUR_OWN}."
        )
    checkpoint = checkpoint_of(file, content)
    snapshot = {0: "initialisation"}.get(checkpoint.epoch, f"epoch {checkpoint.epoch}")
    if file.stem in ("last", "best"):
        snapshot = file.stem
    return LoadedModel(
        path=str(path),
        sha256=digest,
        module=checkpoint.build().with_exact_positions(),
        source="semdiag",
        snapshot=snapshot,
        task=checkpoint.training.task_label,
        seed=checkpoint.training.seed,
        epoch=checkpoint.epoch,
        training=checkpoint.training,
        history=checkpoint.history,
        provenance=checkpoint.provenance,
        weights_sha256=weights_sha256(checkpoint.state),
        recorded_weights=_recorded(file, checkpoint.recorded_weights),
    )


def _recorded(file: Path, inside: str) -> dict[str, str]:
    """Return the hashes of the weights recorded in a checkpoint and in the ``manifest.json`` beside its folder."""
    recorded = {"file": inside} if inside else {}
    folder = file.absolute().parent
    try:
        manifest = read_json(folder.parent / "manifest.json")
    except InputError:
        return recorded
    for entry in manifest if isinstance(manifest, list) else ():
        if isinstance(entry, dict) and entry.get("run") == folder.name:
            hashes = entry.get("weights_sha256")
            digest = hashes.get(file.name) if isinstance(hashes, dict) else None
            recorded |= {"manifest": digest} if isinstance(digest, str) else {}
    return recorded
