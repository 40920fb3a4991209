"""Match models with those of a baseline: by content, wherever the files are."""

from dataclasses import dataclass
from typing import Any

from semdiag.measuring.findings.pairing import RUN_AND_SNAPSHOT

Entry = dict[str, Any]
CONTENT = ("weights_sha256", *RUN_AND_SNAPSHOT, "attention", "k", "global_tokens")
_RUN = ("task", "attention", "k", "seed", "snapshot")
# What must agree, the surest first: models may share weights, as full and top-k ones do before training.
_KNOWN_BY = (
    CONTENT,
    tuple(name for name in CONTENT if name != "snapshot"),  # a file under another name
    tuple(name for name in CONTENT if name != "weights_sha256"),  # trained anew
    _RUN,
)
_PLACE = ("model", "task", "attention", "k")


@dataclass(frozen=True)
class Match:
    """Which models are the same.

    Attributes:
        pairs: entries of the baseline and the models that they are now.
        gone: entries that no model is.
        unclear: entries, each with the models that may be it and as well another's.
        new: models that no entry speaks about.
    """

    pairs: list[tuple[Entry, Entry]]
    gone: list[Entry]
    unclear: list[tuple[Entry, list[Entry]]]
    new: list[Entry]


def match(baseline: list[Entry], now: list[Entry]) -> Match:
    """Match models by weights and all that is known of them; else by their run; else by path, attention and k.

    An entry and a model are a pair where each is the only one that the other agrees with; of several the one with
    the same path. What an older baseline does not say of a model agrees with everything.

    Args:
        baseline: with ``model`` (the path) and, as far as they are known, the names in :data:`CONTENT`.
        now: the same of the models of now, all names known.

    Returns:
        Every entry once, and every model at most once in a pair.
    """
    found = _pairs(baseline, now)
    left = [entry for e, entry in enumerate(baseline) if e not in found]
    free = [model for m, model in enumerate(now) if m not in found.values()]
    could = [[m for m in free if any(_agree(e, m, names) for names in _KNOWN_BY)] for e in left]
    taken = [model["model"] for several in could for model in several]
    return Match(
        pairs=[(baseline[e], now[m]) for e, m in sorted(found.items())],
        gone=[entry for entry, several in zip(left, could, strict=True) if not several],
        unclear=[(entry, several) for entry, several in zip(left, could, strict=True) if several],
        new=[model for model in free if model["model"] not in taken],
    )


def _pairs(baseline: list[Entry], now: list[Entry]) -> dict[int, int]:
    """Return which model each entry is, by their positions, where that is clear."""
    found: dict[int, int] = {}
    for names in (*(some for known in _KNOWN_BY for some in ((*known, "model"), known)), _PLACE):
        free = [m for m in range(len(now)) if m not in found.values()]
        agreeing = {
            e: [m for m in free if _agree(baseline[e], now[m], names)]
            for e in range(len(baseline))
            if e not in found
        }
        claims = [m for several in agreeing.values() for m in several]
        found |= {e: m[0] for e, m in agreeing.items() if len(m) == 1 and claims.count(m[0]) == 1}
    return found


def _agree(entry: Entry, model: Entry, names: tuple[str, ...]) -> bool:
    """Return whether both have the first fact, and agree in all that the entry has."""
    return bool(entry.get(names[0])) and all(entry.get(name, model[name]) == model[name] for name in names)
