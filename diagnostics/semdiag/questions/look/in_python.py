"""The page of one text, in Python."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import unnamed
from semdiag.questions.look.measure import fitting_k, given_sample, see
from semdiag.questions.look.page import place_of, write_look
from semdiag_models import InputError


def look(
    model: LoadedModel | nn.Module,
    inputs: str | Batch | Iterable[Batch],
    out: str | Path = "look.html",
    *,
    tokens: Sequence[str] | None = None,
    k: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a page that shows one input through every head: kept keys, scores before the softmax, δ and Δ.

    The model runs once, in evaluation mode and without gradients; the mode of every module is restored. The page
    needs no network. If there are more than 256 token ids, or their scores take more than 12 MiB, the last ones
    are left out, and the page says so.

    Source: paper, Def. 3 and eqs. 19, 22 for δ and Δ. Deviation: none.

    Args:
        model: from :func:`semdiag.load`, or any module.
        inputs: a text, for a Hugging Face model; or the model's inputs, of which the first sample is taken.
        out: the page, an .html file; only an earlier page of this kind is replaced.
        tokens: the text of each token; by default from the model's tokenizer, else ids, else positions.
        k: how many of each query's scores are shown as kept at first; None: 5.
        device: where to run; None: where the model is.
        dtype: of the model and the scores; None: the model's own.

    Returns:
        The page.

    Raises:
        InputError: if the input does not suit the model, the number of ``tokens`` is wrong, no attention is
            captured, no query has k keys, or the page cannot be written.

    Example:
        >>> import tempfile
        >>> from semdiag_models import Encoder, ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = look(encoder, torch.tensor([[0, 1, 1, 0]]), Path(folder) / "look.html", tokens="abba", k=2)
        ...     print(page.name, page.stat().st_size > 1000)
        look.html True
    """
    loaded = unnamed(model)
    place = place_of(loaded.path, Path(out))
    seen = see(loaded, given_sample(loaded, inputs, tokens), device, dtype)
    if tokens is not None and not any(seen.sample.tokens in (one.queries, one.keys) for one in seen.layers):
        raise InputError(
            f"Got {len(tokens)} tokens, but no attention of {loaded.path} has that many queries or keys."
        )
    write_look(seen, fitting_k(seen, k), f"semdiag.look(model, inputs, {str(out)!r})", place)
    return place
