"""Kinds of sparse attention that a model is run with, side by side at equal numbers of keys."""

from collections.abc import Callable, Sequence

from semdiag.capturing.mask_rules import Keep, RandomK, Rule, TopK, TopP, Window
from semdiag_models import InputError

TOP_K, RANDOM = "topk", "random"
SINKS = 4  # first keys that a window keeps, as in StreamingLLM
SHARES = 0.8, 0.9, 0.95, 0.99  # shares of the weight that top-p keeps
# What each kind is, in the order of tables.
KINDS = {
    TOP_K: "the k largest scores of each query and head",
    "topk-group": "the k heaviest keys of each query, the same for all heads that share a key head",
    "topk-layer": "the k heaviest keys of each query, the same for all heads of a layer",
    "topk-4-layers": "the k heaviest keys of each query in every fourth layer, kept by the three layers after it",
    "block-16": "the blocks of 16 keys with the largest mean score, k keys in all",
    "block-32": "the blocks of 32 keys with the largest mean score, k keys in all",
    "block-64": "the blocks of 64 keys with the largest mean score, k keys in all",
    "window": f"the nearest keys and the first {SINKS}, k in all",
    "topp": "the fewest keys that hold 80, 90, 95 or 99% of the weight of each query and head",
    RANDOM: "k keys drawn at random, a control",
}
OWN_KINDS = TOP_K, RANDOM  # the kinds of a run without --kinds
EXTERNAL_KINDS = TOP_K, "topk-layer", "block-16", "window", RANDOM


def rule_of(kind: str, k: int, seed: int) -> Rule | None:
    """Return the rule by which a kind keeps k keys; None if it has none for so few."""
    if kind == RANDOM:
        return RandomK(k, seed)
    if kind == "window":
        return Window(k, SINKS) if k > SINKS else None
    if kind.startswith("block-"):
        block = int(kind.removeprefix("block-"))
        return TopK(k // block, block=block, by="mean") if k >= block else None
    shared = {"topk-group": ("group", 1), "topk-layer": ("layer", 1), "topk-4-layers": ("layer", 4)}
    how, every = shared.get(kind, ("head", 1))
    return TopK(k, shared=how, every=every)  # type: ignore[arg-type]


def masks_of(
    ks: Sequence[int],
    seed: int,
    kinds: Sequence[str] = OWN_KINDS,
    asked: Sequence[str] = (),
    remark: Callable[[str, str], None] | None = None,
) -> list[tuple[str, int, Keep]]:
    """Return name, k and rule of every mask, by kind; for top-p, k is its share of the weight in percent."""
    masks: list[tuple[str, int, Keep]] = []
    for kind in KINDS:
        if kind not in kinds:
            continue
        if kind == "topp":
            masks += [(kind, round(100 * p), TopP(p)) for p in SHARES]
            continue
        ruled = [(k, rule_of(kind, k, seed)) for k in ks]
        if kind in asked and not any(rule for _, rule in ruled):
            least = next(k for k in range(1, max(ks) + 65) if rule_of(kind, k, seed) is not None)
            if remark is None:
                raise InputError(f"{kind} needs k of at least {least}. Got {', '.join(map(str, ks))}.")
            text = f"{kind} is left out: it needs k of at least {least}, and {max(ks)} is the largest"
            remark(text, "k-left-out")
        masks += [(kind, k, rule) for k, rule in ruled if rule is not None]
    return masks


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse a kind that does not exist."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"There is no kind of sparse attention {unknown[0]!r}. Kinds: {', '.join(KINDS)}.")
