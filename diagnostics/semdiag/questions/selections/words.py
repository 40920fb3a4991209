"""Sentences on two selections, and on those of a model."""

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.columns import number


def comparison_sentences(found: Summary) -> list[str]:
    """Return what was found of two selections, a fact a sentence.

    Args:
        found: the entry of results that :mod:`semdiag.questions.selections.answer.compare` makes.
    """
    changed, rows, aligned = found["changed"], found["rows"], found["alignment"]
    said = [_alignment(aligned, found["tokens"])] if aligned["kind"] != "as given" else []
    if changed:
        share = f"{changed:,} of {rows:,} rows differ ({100 * changed / rows:.3g}%)"
        worst = found["worst"]
        place = f"token {worst['token']}, layer {worst['layer']}"
        place += f", head {worst['head']}" if found["heads"] > 1 else ""
        first = f"layer {found['first_layer']} is the first with a difference"
        said.append(f"{share}; {first}; mean overlap {found['overlap']:.4f}.")
        said.append(f"Worst row: {place}, overlap {number(worst['overlap'])} ({worst['class']}).")
    else:
        said.append(f"The keys of all {rows:,} rows are the same.")
    moved = found["displacement"]
    if moved["largest"]:
        mean, largest = number(moved["mean"]), number(moved["largest"])
        said.append(f"Keys that both chose stand {mean} places apart in the mean, {largest} in the farthest row.")
    lost = found["lost"]
    if changed and lost["of"]:
        worst_lost = number(lost["largest"])
        said.append(f"Weight lost ({lost['of']}): {number(lost['mean'])} in the mean, {worst_lost} at most.")
    said += _repeats(found)
    return said + ([_verdict(found)] if changed else [])


def _alignment(aligned: Summary, tokens: int) -> str:
    """Which tokens belong together."""
    overlaps = f"overlap {aligned['overlap_aligned']:.4f}, as given {aligned['overlap_as_given']:.4f}"
    advice = "." if aligned["applied"] else "; --align compares them so."
    if aligned["kind"] == "shifted":
        sign = "+" if aligned["shift"] > 0 else "−"
        shift = f"token t of the first is token t {sign} {abs(aligned['shift'])} of the second"
        return f"Tokens are shifted: {shift} ({overlaps}){advice}"
    many = f"{aligned['tokens']:,} of {tokens:,} find their partner"
    return f"Tokens are permuted: {many} ({overlaps}){advice}"


def _repeats(found: Summary) -> list[str]:
    """Rows that name a key twice."""
    return [
        f"{many} rows of {found[which]} name a key twice: semdiag selections {found[which]}"
        for which, many in found["repeats"].items()
        if many
    ]


def _verdict(found: Summary) -> str:
    """What the differences are."""
    classes = found["classes"]
    if classes["unexplained"]:
        return "Whether rounding explains the differences is unknown: neither file has scores."
    share = f"Rounding explains {classes['numeric']:,} of {found['changed']:,} differences"
    if not classes["bug"]:
        return f"{share}."
    said = f"{share}. It does not explain {classes['bug']:,}: a bug, or scores that differed already."
    if found["by_own_scores"] is None:
        return said
    return f"{said} In {found['by_own_scores']:,} of these each engine chose the top-k of its own scores."


def own_sentences(found: Summary) -> list[str]:
    """Return what was found of a model's own selections, a fact a sentence.

    Args:
        found: the entry of results that :mod:`semdiag.questions.selections.answer.own` makes.
    """
    rows, form = found["selections"], found["format"]
    said = [
        f"Certified: rounding each score once to {form} cannot change the choice. A model that computes in {form} "
        "throughout has scores that may differ by more."
    ]
    if any(row["margin_of"] == "logits" for row in rows):
        said.append("Where a softmax or sigmoid made the scores, margin and certificate are those of its logits.")
    if found.get("propagated", {}).get("reason"):
        said.append(f"No forecast of choices that change: {found['propagated']['reason']}.")
    idle = [row["module"] for row in rows if row["inactive"]]
    if idle:
        said.append(f"Selection inactive, as no row has more than k to choose from: {_named(idle)}.")
    padded = {row["padded"] for row in rows}
    if max(padded):
        said.append(f"Left out: {'up to ' * (len(padded) > 1)}{max(padded):,} padded rows of each selection.")
    unknown = [row["module"] for row in rows if not row["padding_known"]]
    if unknown:
        said.append(f"Padding is not told apart, all rows count: {_named(unknown)}.")
    others = [f"{other['module'] or 'the model'} {tuple(other['shape'])}" for other in found["others"]]
    if others:
        said.append(f"Not measured, as their rows are no tokens: {_named(others)}.")
    for row in rows:
        faulty = {name: number for name, number in row["counts"].items() if number and name not in _IN_ORDER}
        if faulty:
            kinds = ", ".join(f"{number:,} {name}" for name, number in faulty.items())
            said.append(f"{row['module']} has faulty rows: {kinds}.")
    said += _not_compared(found)
    said += _without(found["without_selection"])
    return [*said, f"{found['faults']:,} of {found['rows']:,} rows are faulty."]


def _not_compared(found: Summary) -> list[str]:
    """Which choices of keys are not compared with dense attention."""
    seen = {row["chosen_by"] for row in found["dense"]}
    alone = [
        row["module"] for row in found["selections"] if row["kind"] != "experts" and row["module"] not in seen
    ]
    unlike = [row["attention"] for row in found["dense"] if row["unlike"]]
    said = [f"Not compared with dense attention, as no attention to the chosen keys was seen: {_named(alone)}."]
    said.append(f"Not compared, as it attends to other keys than were chosen: {_named(unlike)}.")
    return [sentence for sentence, names in zip(said, (alone, unlike), strict=True) if names]


def _without(found: Summary | None) -> list[str]:
    """What the model is without the selection of its indexers."""
    if found is None:
        return []
    begin = "With k raised to the length, in a second run,"
    if found["reason"]:
        return [f"{begin} the model cannot be run ({found['reason']})."]
    said, layers = [], found["layers"]
    for row in (row for row in layers if row["dense"] is False):
        what = f"{row['attention']} is not dense attention"
        if row["other_keys"]:
            said.append(f"{begin} {what}: {row['other_keys']:,} of {row['rows']:,} rows attend to other keys.")
        else:
            far = f"deviates by {number(row['residual'])} of its largest, {number(row['over_rounding'])} times"
            said.append(f"{begin} {what}: its output {far} what rounding explains.")
    unknown = [row["attention"] for row in layers if row["dense"] is None]
    if unknown:
        said.append(f"{begin} outputs are not finite: {_named(unknown)}.")
    if found["dense"]:
        each = "the attention behind an indexer is" if len(layers) == 1 else f"all {len(layers)} layers are"
        said.append(f"{begin} {each} dense attention to rounding.")
    outputs = found["outputs"]
    if outputs is not None:
        said.append(f"{_changed(outputs)}.")
    return said


def _changed(outputs: Summary) -> str:
    """What selections change of the outputs."""
    if not outputs["predictions"]:
        return (
            f"Against that run, the selections change outputs by {number(outputs['output_change'])} of their norm"
        )
    share = f"{100 * outputs['changed_share']:.3g}% of the predictions"
    said = (
        f"Against that run, the selections change {share}, and KL is {number(outputs['divergence'])} nats a token"
    )
    if not outputs["targets"]:
        return said
    return f"{said}; the loss is {number(outputs['loss'])} instead of {number(outputs['loss_without'])}"


_IN_ORDER = ("exact", "legal_tie", "within_rounding")


def _named(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
