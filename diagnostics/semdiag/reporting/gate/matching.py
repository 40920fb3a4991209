"""Match models with those of a baseline by content, wherever the files are."""

from dataclasses import dataclass
from typing import Any

from semdiag.measuring.findings.pairing import RUN_AND_SNAPSHOT

Entry = dict[str, Any]
CONTENT = ("weights_sha256", *RUN_AND_SNAPSHOT, "attention", "k", "global_tokens")
_RUN = ("task", "attention", "k", "seed", "snapshot")
# Facts that must agree, the surest first: models may share weights, like full and top-k ones before training.
_KNOWN_BY = (
    CONTENT,
    tuple(name for name in CONTENT if name != "snapshot"),  # a file under another name
    tuple(name for name in CONTENT if name != "weights_sha256"),  # trained again
    _RUN,
)
_PLACE = ("model", "task", "attention", "k")


@dataclass(frozen=True)
class Match:
    """Which models are the same."""

    pairs: list[tuple[Entry, Entry]]  # entries of the baseline and the models that they are now
    missing: list[Entry]  # entries without a model
    # entries with several possible models, or whose model may belong to another entry
    unclear: list[tuple[Entry, list[Entry]]]
    new: list[Entry]  # models without an entry


def match(baseline: list[Entry], now: list[Entry]) -> Match:
    """Match models by weights and all that is known of them; else by their run; else by path, attention and k."""
    matches = _pairs(baseline, now)
    left = [entry for e, entry in enumerate(baseline) if e not in matches]
    free = [model for m, model in enumerate(now) if m not in matches.values()]
    could = [[m for m in free if any(_agree(e, m, names) for names in _KNOWN_BY)] for e in left]
    taken = [model["model"] for several in could for model in several]
    return Match(
        pairs=[(baseline[e], now[m]) for e, m in sorted(matches.items())],
        missing=[entry for entry, several in zip(left, could, strict=True) if not several],
        unclear=[(entry, several) for entry, several in zip(left, could, strict=True) if several],
        new=[model for model in free if model["model"] not in taken],
    )


def _pairs(baseline: list[Entry], now: list[Entry]) -> dict[int, int]:
    """Return which model each entry is, by position, if that is unambiguous."""
    matched: dict[int, int] = {}
    for names in (*(facts for known in _KNOWN_BY for facts in ((*known, "model"), known)), _PLACE):
        free = [m for m in range(len(now)) if m not in matched.values()]
        agreeing = {
            e: [m for m in free if _agree(baseline[e], now[m], names)]
            for e in range(len(baseline))
            if e not in matched
        }
        claims = [m for several in agreeing.values() for m in several]
        matched |= {e: m[0] for e, m in agreeing.items() if len(m) == 1 and claims.count(m[0]) == 1}
    return matched


def _agree(entry: Entry, model: Entry, names: tuple[str, ...]) -> bool:
    """Return whether both have the first fact, and agree in all facts of the entry."""
    return bool(entry.get(names[0])) and all(entry.get(name, model[name]) == model[name] for name in names)
