"""The page of one text: a map of the heads, behind each its scores; and ``semdiag.look``, which writes it."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup, escape
from torch import nn

from semdiag.capturing.audit import WARNING
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.words import UNKNOWN, counted, layer_name, number, percent
from semdiag.presenting.answer import file_safe, page_environment, page_style
from semdiag.presenting.drawing.style import reference_words
from semdiag.questions.look.measure import (
    LARGEST,
    LONGEST,
    Cut,
    Head,
    InputView,
    LayerView,
    fitting_k,
    given_sample,
    see,
)
from semdiag_files import InputError, open_file, visible, write_text

GENERATOR = "semdiag look"
_FURTHEST = 5  # heads at either end of δ that stand in the table
_BROAD = 16  # heads of a layer, above which the map takes the whole width
_MARKS = str.maketrans({"\n": "↵", "\t": "⇥"})
# Characters that could end a script or be read as markup are escaped, and so is everything that is not ASCII.
_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}
_NUMBERS = ("dispersion", "entropy", "first_weight")
_LATER = "of later ones, give a text that begins there"
_CUT = {
    Cut.REQUESTED: f"(--max-length {{}}); --max-length {LONGEST} shows the most that a page holds",
    Cut.MODEL: f"(the model takes no more); {_LATER}",
    Cut.PAGE: f"(a page holds no more); {_LATER}",
    Cut.SCORES: f"(a page holds {LARGEST >> 20} MiB of scores); {_LATER}",
}


def render_look(view: InputView, k: int, command: str, groups: Mapping[str, Any] | None = None) -> str:
    """Return the page; tokens and names are escaped, and control characters are made visible."""
    environment = page_environment()
    environment.filters["number"] = partial(number, infinite=UNKNOWN)
    environment.filters["percent"] = percent
    folder = files("semdiag.questions.look").joinpath("templates")
    parts = {
        name: folder.joinpath(f"look.{name}").read_text(encoding="utf-8") for name in ("css", "js", "html.j2")
    }
    heads = all_heads(view)
    broadest = max(len(layer.heads) for layer in view.layers)
    largest = max((one.dispersion for *_, one in heads if math.isfinite(one.dispersion)), default=0.0)
    return environment.from_string(parts["html.j2"]).render(
        style=Markup(f"{page_style()}\n{parts['css']}"),
        script=Markup(parts["js"]),
        data=Markup(
            json.dumps(_data(view, k, groups or {}), separators=(",", ":"), allow_nan=False).translate(_ESCAPES)
        ),
        generator=GENERATOR,
        view=view,
        broadest=broadest,
        broad=broadest > _BROAD,
        largest=largest,
        part_of_largest=lambda value: _share(value, largest),
        furthest=furthest(heads),
        count=len(heads),
        counted=counted,
        lead=lead(view),
        trained=_trained(view)[0],
        cautions=cautions(view),
        remarks=[f"{remark.module or 'The model'}: {remark.text}." for remark in view.audit.remarks],
        selecting=any(one.selected is not None for *_, one in heads),
        command=command,
        versions={name: version(name) for name in ("semdiag", "torch")} | {"dtype": view.dtype},
    )


def is_page_of(model: str | None, head: str) -> bool:
    """Return whether a file is a page of semdiag look."""
    tags = [f'<meta name="generator" content="{GENERATOR}">']
    tags += [] if model is None else [f'<meta name="model" content="{escape(visible(model))}">']
    return all(tag in head for tag in tags)


def all_heads(view: InputView) -> list[tuple[int, int, Head]]:
    """Return every head with its layer and number."""
    return [(layer, head, one) for layer, each in enumerate(view.layers) for head, one in enumerate(each.heads)]


def cautions(view: InputView) -> list[str]:
    """Return what limits the answer, in sentences: what was left out, and warnings."""
    sentences = []
    if view.sample.cut is not None:
        reason = _CUT[view.sample.cut].format(view.length)
        sentences.append(f"The input is longer: its first {view.length} tokens are shown {reason}")
    if view.folded:
        where = view.folded[0] or "the model"
        if len(view.folded) > 1:
            where += " and others"
        sentences.append(f"The batch axis of {where} holds several rows (heads or windows): the first is shown")
    if broken := sum(not np.isfinite(one.scores).all() for *_, one in all_heads(view)):
        sentences.append(f"Heads with scores that are no finite numbers: {broken} of {len(all_heads(view))}")
    if view.residual > 1:
        sentences.append(
            f"Recomputed from what was captured, the attention differs from the model's own by "
            f"{view.residual:.3g} times what rounding can do: something of it was missed"
        )
    sentences += [
        f"Not captured: {one.operation} in {one.module or 'the model'}: {one.reason}" for one in view.audit.skipped
    ]
    sentences += [one.text for one in view.audit.remarks if one.severity == WARNING]
    return [f"{text[:1].upper()}{text[1:]}." for text in dict.fromkeys(sentences)]


def furthest(heads: Sequence[tuple[int, int, Head]]) -> list[tuple[int, int, Head]]:
    """Return the heads of the largest and of the smallest median δ, the largest first."""
    ranked = sorted(
        (entry for entry in heads if math.isfinite(entry[2].dispersion)), key=lambda e: -e[2].dispersion
    )
    return ranked if len(ranked) <= 2 * _FURTHEST else ranked[:_FURTHEST] + ranked[-_FURTHEST:]


def lead(view: InputView) -> str:
    """Return a sentence on the head whose scores lie furthest apart."""
    heads = all_heads(view)
    extremes = furthest(heads)
    if not extremes:
        return "No head has finite scores."
    number, head, most = extremes[0]
    middle = float(np.median([one.dispersion for *_, one in heads if math.isfinite(one.dispersion)]))
    middle_words = f", where the middle head has {middle:.3g}" if len(extremes) > 1 else ""
    layer = layer_name(number, [one.module for one in view.layers])
    start = f"Head {head} of layer {layer} spans the widest range of scores"
    return f"{start}: median δ {most.dispersion:.3g} nats{middle_words}."


def _data(view: InputView, k: int, groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the script reads: labels and masks once, scores as base64 of little-endian floats."""
    labels: dict[tuple[str, ...], int] = {}
    masks: dict[tuple[tuple[int, ...], bytes], int] = {}
    size = max(head.scores.dtype.itemsize for *_, head in all_heads(view))

    def label(words: list[str]) -> int:
        return labels.setdefault(tuple(visible(word).translate(_MARKS) for word in words), len(labels))

    def mask(pairs: np.ndarray | None) -> int | None:
        if pairs is None:
            return None
        bits = np.packbits(pairs, axis=None, bitorder="little").tobytes()
        return masks.setdefault((pairs.shape, bits), len(masks))

    def layer(one: LayerView) -> dict[str, Any]:
        heads = [
            {
                "scores": _base64(head.scores.astype(f"<f{size}").tobytes()),
                "allowed": mask(head.allowed),
                "selected": mask(head.selected),
                "sink": _sink(head.sink),
                "numbers": [float(f"{x:.6g}") if math.isfinite(x) else None for x in head.numbers],
            }
            for head in one.heads
        ]
        return {
            "module": visible(one.module) + (f" (call {one.occurrence})" if one.occurrence else ""),
            "queries": label(one.queries),
            "keys": label(one.keys),
            "one": not one.crossing and one.queries == one.keys,
            "heads": heads,
        }

    layers = [layer(one) for one in view.layers]
    return {
        "k": k, "tokens": view.length,
        "groups": {visible(name): np.flatnonzero(_group(name, of, view)).tolist() for name, of in groups.items()},
        "trained": _trained(view), "bytes": size, "layers": layers, "labels": [list(words) for words in labels],
        "masks": [_base64(bits) for _, bits in masks],
    }  # fmt: skip


def _group(name: str, tokens: Any, view: InputView) -> np.ndarray:
    in_group = np.asarray(tokens)
    length = view.length
    if in_group.dtype != bool or in_group.shape != (length,):
        raise InputError(f"The group {name} must be bool, ({length},). Got {in_group.dtype} of {in_group.shape}.")
    return in_group


def _trained(view: InputView) -> list[str]:
    """Return what trained models have of each of the three numbers; empty for encoders, which are far smaller."""
    sentences = (f"In trained models 90% of the heads have {reference_words(name, [])}." for name in _NUMBERS)
    return list(sentences) if view.model.external else [""] * len(_NUMBERS)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _sink(value: float | None) -> float | str | None:
    """Return a learnt logit; None if there is none or it is -inf, ``"NaN"`` if it is not finite otherwise."""
    if value is None or value == -math.inf:
        return None
    return value if math.isfinite(value) else "NaN"


def _share(value: float, largest: float) -> int:
    """Return how strongly a cell is coloured, 0 … 100: by the root, so that one outlier does not hide the rest."""
    return round(100 * math.sqrt(max(value, 0.0) / largest)) if largest and math.isfinite(value) else 0


_HEAD = 4096  # bytes of a page that contain its generator tag


def place_of(model: str, out: Path | None) -> Path:
    """Return the file for a page, before anything is measured; refuse one that is something else."""
    place = out or Path("reports") / f"look-{file_safe(model)}.html"
    if place.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out takes the name of an .html file. Got {place}.")
    head = None
    if place.exists():
        with open_file(place) as file:
            head = file.read(_HEAD).decode("utf-8", "replace")
    if head is not None and not is_page_of(None, head):
        raise InputError(
            f"{place} is not a page of semdiag look and is not replaced. Name another file with --out FILE.html."
        )
    if out is None and head is not None and not is_page_of(model, head):
        digest = hashlib.sha256(model.encode("utf-8", "surrogateescape")).hexdigest()
        return place_of(model, place.with_name(f"{place.stem}-{digest[:8]}.html"))
    return place


def write_look(
    view: InputView, k: int, command: str, place: Path, groups: Mapping[str, Any] | None = None
) -> None:
    """Write the page, whole or not at all."""
    page = render_look(view, k, command, groups)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, page)
    except OSError as error:
        raise InputError(f"{place} cannot be written: {error.strerror or error}.") from None


def look(
    model: LoadedModel | nn.Module,
    inputs: str | Batch | Iterable[Batch],
    out: str | Path = "look.html",
    *,
    tokens: Sequence[str] | None = None,
    k: int | None = None,
    groups: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a page that shows one input through every head: kept keys, scores before the softmax, δ and Δ.

    The model runs once, in evaluation mode and without gradients; the mode of every module is restored. The page
    needs no network. If there are more than 256 token ids, or their scores take more than 12 MiB, the last ones
    are left out, and the page says so.

    Source: paper, Def. 3 and eqs. 19, 22 for δ and Δ. Deviation: none.

    Args:
        model: A model from :func:`semdiag.load`, or any module.
        inputs: a text, for a Hugging Face model; or the model's inputs, of which the first sample is taken.
        out: the page, an .html file; only an earlier page of this kind is replaced.
        tokens: the text of each token; by default from the model's tokenizer, else ids, else positions.
        k: how many of each query's scores are shown as kept at first; None: 5.
        groups: for each name (image, text, register …), which tokens belong to it: bool, (L,). The page shows
            the weight that they give one another in each head.
        device: where to run; None: where the model is.
        dtype: Number format of the model and the scores; None: the model's own.

    Returns:
        The page.

    Raises:
        InputError: if the input does not suit the model, the number of ``tokens`` is wrong, no attention is
            captured, no query has k keys, a group does not fit, or the page cannot be written.

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
    view = see(loaded, given_sample(loaded, inputs, tokens), device, dtype)
    if tokens is not None and not any(view.sample.tokens in (one.queries, one.keys) for one in view.layers):
        raise InputError(
            f"Got {len(tokens)} tokens, but no attention of {loaded.path} has that many queries or keys."
        )
    write_look(view, fitting_k(view, k), f"semdiag.look(model, inputs, {str(out)!r})", place, groups)
    return place
