"""The task of ``semdiag train text``."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semdiag_models import Text, TrainingConfig


def text_task(
    file: Path | None,
    holdout: Path | None,
    tokenizer: str | None,
    vocabulary: int | None,
    window: int | None,
    quiet: bool,
) -> "Text":
    """Read the text and learn its pieces, which takes about a second per megabyte."""
    from contextlib import nullcontext

    from semdiag.presenting.terminal.minutes import Minutes
    from semdiag.presenting.terminal.terminal import terminal
    from semdiag_models import InputError, Text, open_text

    if file is None:
        raise InputError("The task text needs a file to learn from: semdiag train text --text FILE.")
    if window is not None and window < 1:
        raise InputError(f"--window must be at least 1. Got {window}.")
    console, learning = terminal(stderr=True), "learning the pieces of the text"
    with (
        console.status(learning.capitalize()) if console.is_terminal and not quiet else nullcontext(),
        Minutes(learning, lambda: learning, lambda: None, quiet or console.is_terminal),
    ):
        source = open_text(file, holdout, tokenizer or "unigram", 4096 if vocabulary is None else vocabulary)
    return Text(source, window)


def introduction(training: "TrainingConfig") -> str:
    """Return one line on the text's samples; an empty string for other tasks."""
    text = training.text
    return (
        ""
        if text is None
        else (
            f"{text.file}: windows of {training.length} pieces, {training.train_samples:,} to train on, "
            f"{training.holdout_samples:,} of {text.holdout_file or 'the last tenth of the lines'} held out."
        )
    )
