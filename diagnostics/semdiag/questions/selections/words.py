"""Sentences on two selections, and on those of a model."""

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.columns import number


def comparison_sentences(answer: Summary) -> list[str]:
    """Return how two selections differ, the verdict first, from the JSON of their comparison."""
    changed, rows = answer["changed"], answer["rows"]
    sentences = [_verdict(answer)] if changed else [f"The keys of all {rows:,} rows are the same."]
    if changed:
        share = f"{changed:,} of {rows:,} rows differ ({100 * changed / rows:.3g}%)"
        worst = answer["worst"]
        place = f"token {worst['token']}, layer {worst['layer']}"
        place += f", head {worst['head']}" if answer["heads"] > 1 else ""
        first = f"layer {answer['first_layer']} is the first with a difference"
        sentences.append(f"{share}; {first}; mean overlap {answer['overlap']:.4f}.")
        sentences.append(f"Worst row: {place}, overlap {number(worst['overlap'])} ({worst['class']}).")
    moved = answer["displacement"]
    if moved["largest"]:
        mean, largest = number(moved["mean"]), number(moved["largest"])
        sentences.append(
            f"Keys that both chose stand {mean} places apart on average, {largest} in the farthest row."
        )
    lost = answer["lost"]
    if changed and lost["of"]:
        worst_lost = number(lost["largest"])
        sentences.append(f"Weight lost ({lost['of']}): {number(lost['mean'])} on average, {worst_lost} at most.")
    guessed = sorted({name for name in answer["layouts"] if "," in name})
    if guessed and not answer["layout_named"]:
        sentences.append(f"The dimensions before k are read as {' and '.join(guessed)}; --layout names others.")
    return sentences + ignored_sentences(answer) + _repeats(answer)


def ignored_sentences(answer: Summary) -> list[str]:
    """Return which arrays were not looked at, and a hint at the format where another may explain more."""
    sentences = [f"Ignored: {', '.join(answer['ignored'])}."] if answer["ignored"] else []
    wrong = answer["classes"]["bug"] if "classes" in answer else answer["counts"]["wrong"]
    if wrong and not answer["format_named"]:
        sentences.append(f"Scores are taken for {answer['format']}; name the engine's precision with --format.")
    return sentences


def _repeats(answer: Summary) -> list[str]:
    """Return sentences on rows that name a key twice."""
    return [
        f"{many} rows of {answer[which]} name a key twice: semdiag selections {answer[which]}"
        for which, many in answer["repeats"].items()
        if many
    ]


def _verdict(answer: Summary) -> str:
    """Return a sentence on what the differences are."""
    classes = answer["classes"]
    if classes["unexplained"]:
        return "Whether rounding explains the differences is unknown: neither file has scores."
    share = f"Rounding explains {classes['numeric']:,} of {answer['changed']:,} differences"
    if not classes["bug"]:
        return f"{share}."
    words = f"{share}. It does not explain {classes['bug']:,}"
    if answer["by_own_scores"] is None:
        return f"{words}: a bug, or scores that differed already, which those of both files would tell."
    words += ": a bug, or scores that differed already."
    return f"{words} In {answer['by_own_scores']:,} of these each engine chose the top-k of its own scores."


def own_sentences(answer: Summary) -> list[str]:
    """Return sentences on a model's own selections, the verdict first, from their JSON."""
    rows, form = answer["selections"], answer["format"]
    sentences = [
        f"{answer['faults']:,} of {answer['rows']:,} rows are faulty.",
        f"Certified: rounding each score once to {form} cannot change the choice. A model that computes in {form} "
        "throughout has scores that may differ by more.",
    ]
    if any(row["margin_of"] == "logits" for row in rows):
        sentences.append(
            "Where a softmax or sigmoid made the scores, margin and certificate are those of its logits."
        )
    idle = [row["module"] for row in rows if row["inactive"]]
    if idle:
        sentences.append(f"Selection inactive, as no row has more than k to choose from: {_named(idle)}.")
    padded = {row["padded"] for row in rows}
    if max(padded):
        sentences.append(f"Left out: {'up to ' * (len(padded) > 1)}{max(padded):,} padded rows of each selection.")
    unknown = [row["module"] for row in rows if not row["padding_known"]]
    if unknown:
        sentences.append(f"All rows count, as it is unknown which are padding: {_named(unknown)}.")
    others = [f"{other['module'] or 'the model'} {tuple(other['shape'])}" for other in answer["others"]]
    if others:
        sentences.append(f"Not measured, as their rows are not tokens: {_named(others)}.")
    for row in rows:
        faulty = {name: number for name, number in row["counts"].items() if number and name not in _IN_ORDER}
        if faulty:
            kinds = ", ".join(f"{number:,} {name}" for name, number in faulty.items())
            sentences.append(f"{row['module']} has faulty rows: {kinds}.")
    return sentences


_IN_ORDER = ("exact", "legal_tie", "within_rounding", "within_error")


def _named(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
