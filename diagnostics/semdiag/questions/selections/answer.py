"""Tables of ``semdiag selections``: of one file, of two, of a model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from semdiag.mathematics.block_formats import SCALED
from semdiag.mathematics.selections import CLASSES, FAULTS, GRAVITY, NOT_JUDGED
from semdiag.measuring.findings.findings import Summary, json_ready, schema
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.words import count, counted, decimals, number, percent, plain, text
from semdiag.presenting.answer import Answer, Claim
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.selections.check import CheckedSelection
from semdiag.selections.compare import (
    BUG,
    NUMERIC,
    SAME,
    UNEXPLAINED,
    ComparedSelections,
)
from semdiag.selections.dense import DenseAttention
from semdiag.selections.own import OwnSelection, OwnSelections


def comparison_sentences(answer: Summary) -> list[str]:
    """Return how two selections differ, the verdict first, from the JSON of their comparison."""
    changed = answer["changed"]
    rows = answer["rows"]
    sentences = [_verdict(answer)]
    if changed:
        verb = "differs" if changed == 1 else "differ"
        share = f"{changed:,} of {counted(rows, 'row')} {verb} ({100 * changed / rows:.3g}%)"
        worst = answer["worst"]
        place = f"token {worst['token']}, {_layer_name(worst)}"
        place += f", head {worst['head']}" if answer["heads"] > 1 else ""
        first = _layer_name({"module": answer["first_module"], "layer": answer["first_layer"]})
        sentences.append(f"{share}; {first} is the first with a difference; mean overlap {answer['overlap']:.4f}.")
        sentences.append(f"Worst row: {place}, overlap {number(worst['overlap'])} ({worst['class']}).")
    sentences += _located_sentences(answer["located"])
    lost = answer["lost"]
    if changed and lost["of"]:
        worst_lost = number(lost["largest"])
        sentences.append(f"Weight lost ({lost['of']}): {number(lost['mean'])} on average, {worst_lost} at most.")
    guessed = sorted({name for name in answer["layouts"] if "," in name})
    if guessed and not answer["layout_named"]:
        sentences.append(f"The dimensions before k are read as {' and '.join(guessed)}; --layout names others.")
    repeats = [
        f"{many} rows of {answer[which]} name a key twice: semdiag selections {answer[which]}"
        for which, many in answer["repeats"].items()
        if many
    ]
    return sentences + ignored_sentences(answer) + repeats


def _located_sentences(located: Summary | None) -> list[str]:
    """Return at which stage the first module that differs goes wrong."""
    if located is None or not located["rows"]:
        return []
    rows = f"{counted(located['rows'], 'row')} (the reference: {percent(located['by_reference'], strict=True)})"
    if located["stage"]:
        mistakes = ", or ".join(located["mistakes"])
        share = percent(located["explained"], strict=True)
        return [f"{located['module']}: {located['stage']}: {mistakes}; explains {share} of {rows}."]
    if located["nearest"]:
        share = percent(located["explained"], strict=True)
        nearest = f"the nearest, {located['nearest']}, explains {share} of {rows}"
        return [f"{located['module']}: none of the known mistakes; {nearest}."]
    return []


def _layer_name(row: dict[str, Any]) -> str:
    return str(row["module"] or f"layer {row['layer']}")


def ignored_sentences(answer: Summary) -> list[str]:
    """Return which arrays were not looked at, and a hint at the format where another may explain more."""
    sentences = [f"Ignored: {', '.join(answer['ignored'])}."] if answer["ignored"] else []
    wrong = answer["classes"]["bug"] if "classes" in answer else answer["counts"]["wrong"]
    if wrong and not answer["format_named"]:
        sentences.append(f"Scores are taken for {answer['format']}; name the engine's precision with --format.")
    return sentences


def _verdict(answer: Summary) -> str:
    classes = answer["classes"]
    rows = answer["rows"]
    if not answer["changed"]:
        every = "all " if rows > 1 else ""
        return f"The keys of {every}{counted(rows, 'row')} are the same."
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
    rows = answer["selections"]
    form = answer["format"]
    sentences = [
        f"{answer['faults']:,} of {counted(answer['rows'], 'row')} are faulty.",
        f"Certified: rounding each score once to {form} cannot change the choice. A model that computes in {form} "
        "throughout has scores that may differ by more.",
    ]
    if any(row["margin_of"] == "logits" for row in rows):
        sentences.append(
            "Where a softmax or sigmoid made the scores, margin and certificate are those of its logits."
        )
    sentences += _unmeasured_sentences(answer) + _reused_sentences(answer["donors"])
    for row in rows:
        sentences += _fault_sentences(row) + _stale_sentences(row)
    return sentences


def _unmeasured_sentences(answer: Summary) -> list[str]:
    """Return which selections decide nothing, and which rows are left out or unknown."""
    rows = answer["selections"]
    sentences = []
    idle = [row["module"] for row in rows if row["inactive"]]
    if idle:
        sentences.append(f"Selection inactive, as no row has more than k to choose from: {_named(idle)}.")
    padded = {row["padded"] for row in rows}
    if max(padded):
        number_left_out = f"{max(padded):,}" if len(padded) == 1 else f"up to {max(padded):,}"
        sentences.append(f"Left out: {number_left_out} padded rows of each selection.")
    unknown = [row["module"] for row in rows if not row["padding_known"]]
    if unknown:
        sentences.append(f"All rows count, as it is unknown which are padding: {_named(unknown)}.")
    unmeasured = [f"{entry['module'] or 'the model'} {tuple(entry['shape'])}" for entry in answer["others"]]
    if unmeasured:
        sentences.append(f"Not measured, as their rows are not tokens: {_named(unmeasured)}.")
    return sentences


def _reused_sentences(donors: dict[str, str]) -> list[str]:
    """Return which layers use the choice of an earlier one."""
    uses = [f"{layer} that of {donor}" for layer, donor in donors.items() if donor]
    unknown = [layer for layer, donor in donors.items() if not donor]
    sentences = [f"Layers without an indexer use an earlier choice: {_named(uses)}."] if uses else []
    if unknown:
        sentences.append(f"Which choice they use, without an indexer, is unknown or changes: {_named(unknown)}.")
    return sentences


def _fault_sentences(row: dict[str, Any]) -> list[str]:
    faulty = {name: rows for name, rows in row["counts"].items() if rows and name in FAULTS}
    if not faulty:
        return []
    kinds = ", ".join(f"{rows:,} {name}" for name, rows in faulty.items())
    return [f"{row['module']} has faulty rows: {kinds}."]


def _stale_sentences(row: dict[str, Any]) -> list[str]:
    """Return whether a selection may reuse what it chose for other tokens."""
    if row["repeats"]:
        return [
            f"{row['module']} chose in {row['repeats']:,} of {row['calls']:,} calls what it chose in the call "
            "before, for other tokens: a stale choice, or one that does not depend on the input."
        ]
    if row["chose_in"] < row["calls"]:
        return [
            f"{row['module']} chose in {row['chose_in']:,} of {row['calls']:,} calls. If it reuses a choice in "
            "the others, that is stale."
        ]
    return []


def _named(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_MEANING = {
    "exact": "the only top-k",
    "legal_tie": "a key left out equals the worst chosen",
    "within_rounding": "a key left out is larger, by rounding",
    "within_error": "a key left out is larger, within the error of the scores",
    "wrong": "a key left out is larger",
    "missing": "too few keys",
    "duplicate": "a key twice",
    "padding": "a key of padding or another document",
    "future": "a key after the query",
    "out_of_range": "an index that is no key",
    "not_judged": "no fault in the keys, scores unknown",
}


def _place(row: Sequence[int]) -> str:
    return ",".join(map(str, row))


_of = "{} of {}".format


def _chosen(k: int, of: int, kind: str) -> str:
    return f"{k} of {of} blocks" if kind == "blocks" else f"{k} of {of}"


_CLASSES = (
    Column("class", form=text), Column("means", "which means", text), Column("rows", form=count, drop=NEVER),
    Column("worst.row", "worst row", _place, drop=NEVER), Column("worst.separation", "separation"),
    Column("worst.separation_ulps", "in units"),
)  # fmt: skip
_LAYERS = (
    Column("module", form=text), Column("layer", form=plain, drop=NEVER), Column("k", form=count, drop=1),
    Column("rows", form=count),
    Column("overlap", form=partial(decimals, places=4), drop=NEVER), Column("changed", "differ", count),
    Column("first", "differ first", count),
    *(Column(name, form=count, drop=NEVER) for name in ("numeric", "bug", "unexplained")),
    Column("lost", "weight lost"),
)  # fmt: skip
_share = partial(percent, form=".3g")
_MARGINS = (
    Column("margin_median", "margin", drop=NEVER),
    Column("margin_p5", "p5", drop=NEVER),
    Column("certified_share", "certified", _share, drop=NEVER),
)
_EXPERTS = (
    Column("module", "experts of", text), Column("k choices", "chosen", _of),
    Column("groups", form=lambda groups: _of(groups["chosen"], groups["of"]) if groups else "–"),
    Column("rows", form=count, drop=2), *_MARGINS, Column("load.largest", "largest load", _share),
    Column("load.smallest", "smallest", _share), Column("load.even", "even", _share, drop=1),
    Column("load.unused", "unused", plain),
)  # fmt: skip
_KEYS = (
    Column("module", "keys of", text),
    Column("k choices kind", "chosen", _chosen),
    Column("rows", form=count, drop=2), Column("deciding", form=count), *_MARGINS,
    Column("ties", form=count, drop=1), Column("first_kept_share", "first key kept", _share),
    Column("future", drop=NEVER), Column("padding", drop=NEVER),
)  # fmt: skip


_DENSE = (
    Column("module", "weight kept of", text), Column("rows", form=count, drop=2),
    Column("kept", "by its indexer", _share), Column("worst_head", "worst head", _share),
    Column("oracle", "by exact top-k", _share), Column("window", "by the newest", _share),
    Column("top1", "holds the largest", _share), Column("recall", form=_share, drop=1),
)  # fmt: skip


def check_answer(summary: Summary) -> Answer:
    """Return the counts of checked selections, the worst row and the verdict."""
    results = summary["results"]
    rows = counted(sum(result["rows"] for result in results), "row")
    faults = sum(result["faults"] for result in results)
    shown = _one_checked(results[0]) if len(results) == 1 else _many_checked(results)
    left_out = sum(result["not_checked"] for result in results)
    if left_out:
        shown.append(f"Not checked: {counted(left_out, 'row')} of padded queries.")
    if any(result["counts"]["out_of_range"] for result in results):
        shown.append("Indices that are no key may be slots of a paged cache: give positions in the sequence.")
    for result in results:
        if result["stale"] > max(1, result["faults"] / 2):
            shown.append(
                f"{result['stale']:,} of {result['faults']:,} faulty rows{_of_module(result)} choose as the row "
                "before did, or should have: a stale choice?"
            )
    verdict = f"{faults:,} of {rows} {'is' if faults == 1 else 'are'} faulty."
    return Answer(opening=[Claim("verdict", verdict)], shown=[*shown, *ignored_sentences(results[0])])


def _of_module(result: Summary) -> str:
    return f" of {result['module']}" if result["module"] else ""


def _one_checked(result: Summary) -> list[str | NumberTable]:
    keys = "" if result["keys"] is None else f" of {counted(result['keys'], 'key')}"
    counts = {**result["counts"], "not_judged": result["not_judged"]}
    classes = [
        {"class": name, "means": meaning, "rows": counts[name], "worst": result["worst_of_class"][name]}
        for name, meaning in _MEANING.items()
        if counts[name]
    ]
    name = f"{result['file']}{_of_module(result)}"
    of_format = f"q and k in {result['format']}" if result["format"] in SCALED else f"scores of {result['format']}"
    size = f"{counted(result['rows'], 'row')}{keys}, k = {result['k']:,}, {of_format}"
    return [f"\n{name}: {size}", NumberTable(_CLASSES, classes), _worst(result)]


def _many_checked(results: list[Summary]) -> list[str | NumberTable]:
    """Return a line for each module, and the gravest of their worst rows."""
    rows = [{**result, **result["counts"]} for result in results]
    present = [name for name in _MEANING if any(row[name] for row in rows)]
    columns = (
        Column("module", form=text), Column("k", form=count, drop=1), Column("rows", form=count),
        *(Column(name, name.replace("_", " "), count) for name in present),
    )  # fmt: skip
    worst = max(results, key=lambda result: GRAVITY.index(result["worst"]["class"]))
    name = f"{results[0]['file']}: {len(results):,} selections, scores of {results[0]['format']}"
    return [f"\n{name}", NumberTable(columns, rows), f"{worst['module']}. {_worst(worst)}"]


def comparison_answer(summary: Summary) -> Answer:
    """Return how far two selections agree, by layer, and what their differences are."""
    (result,) = summary["results"]
    named = any(row["module"] for row in result["layers"])
    layers = counted(len(result["layers"]), "selection" if named else "layer")
    heads = "" if result["heads"] == 1 else f" × {result['heads']:,} heads"
    verdict, *more = comparison_sentences(result)
    k = "" if result["k"] is None else f", k = {result['k']:,}"
    size = f"{counted(result['tokens'], 'token')} × {layers}{heads}{k}"
    name = f"\n{result['file']} and {result['against']}: {size}, scores of {result['format']}"
    left_out = {"numeric", "bug"} if result["classes"]["unexplained"] else {"unexplained"}
    left_out |= {"layer"} if named else {"module"}
    left_out |= {"k"} if result["k"] is not None else set()
    left_out |= set() if result["lost"]["of"] else {"lost"}
    table = NumberTable([one for one in _LAYERS if one.name not in left_out], result["layers"])
    return Answer(opening=[Claim("verdict", verdict)], shown=[name, table, *more])


def own_answer(summary: Summary) -> Answer:
    """Return a model's own selections: of experts, and of keys."""
    (result,) = summary["results"]
    rows = result["selections"]
    verdict, *more = own_sentences(result)
    name = f"\n{result['model']}: {counted(len(rows), 'selection')}, certified for {result['format']}"
    of_experts = [row for row in rows if row["kind"] == "experts"]
    of_keys = [row for row in rows if row["kind"] != "experts"]
    tables = [
        NumberTable(columns, of_kind) for columns, of_kind in ((_EXPERTS, of_experts), (_KEYS, of_keys)) if of_kind
    ]
    if result["dense"] is not None:
        tables.append(NumberTable(_DENSE, result["dense"]["layers"]))
    return Answer(opening=[Claim("verdict", verdict)], shown=[name, *tables, *more])


def _worst(result: Summary) -> str:
    worst = result["worst"]
    begin = f"Worst: row {_place(worst['row'])}, {worst['class']}"
    if worst["worst_chosen"] is None or worst["kth"] is None:
        return f"{begin}."
    scores = f"worst chosen score {number(worst['worst_chosen'], 6)}, k-th score {number(worst['kth'], 6)}"
    unit = "float32" if result["format"] in SCALED else result["format"]  # of scores
    gap = f"gap {number(worst['gap'])}, {number(worst['gap_ulps'])} units of the last place of {unit}"
    return f"{begin}: {scores}, {gap}."


def _summary(entries: list[dict[str, Any]], provenance: dict[str, Any]) -> Summary:
    return Summary(json_ready({"schema": schema("selections"), "provenance": provenance, "results": entries}))


def own_summary(
    measured: OwnSelections,
    model: str,
    format: str,
    provenance: dict[str, Any],
    dense: DenseAttention | None = None,
) -> Summary:
    """Return what ``--json`` prints of a model's own selections."""
    rows = [
        _row(entry) | {"calls": measured.calls, "chose_in": measured.chose[entry.module]}
        for entry in measured.selections
    ]
    faults = sum(row["faults"] for row in rows)
    unmeasured = [
        {"module": module, "shape": list(shape), "times": n} for (module, shape), n in measured.others.items()
    ]
    entry = {
        "model": model, "format": format, "selections": rows, "rows": sum(row["rows"] for row in rows),
        "faults": faults, "passed": not faults, "others": unmeasured, "donors": measured.donors,
        "dense": None if dense is None else _dense_entry(dense),
    }  # fmt: skip
    return _summary([entry], provenance)


def _dense_entry(dense: DenseAttention) -> dict[str, Any]:
    """Return what indexers keep of dense attention: by layer, by head, and with the choice of earlier indexers."""
    layers = []
    for module, heads in dense.heads.groupby("module", sort=False):
        means = heads[["kept", "oracle", "window", "top1", "recall"]].mean().to_dict()
        facts = {
            "module": str(module),
            "indexer": str(heads["indexer"].iloc[0]),
            "rows": int(heads["rows"].iloc[0]),
        }
        layers.append(facts | means | {"worst_head": float(heads["kept"].min())})
    return {
        "layers": layers, "heads": dense.heads.to_dict("records"), "donors": dense.donors.to_dict("records"),
        "left_out": dense.left_out,
    }  # fmt: skip


def _row(entry: OwnSelection) -> dict[str, Any]:
    parts = entry.parts
    first = parts[0]
    margins = _margins(entry)
    number = margins["deciding"]
    counts = sum((part.counts for part in parts), Counter[str]())
    keys = first.kind == "keys"
    later = first.kind != "experts" and first.causal
    return {
        "module": entry.module, "layer": entry.layer, "kind": first.kind,
        "choices": max(part.choices for part in parts), "k": max(part.k for part in parts),
        "groups": None if first.groups is None else {"of": first.groups[0], "chosen": first.groups[1]},
        **margins,
        "padded": sum(part.padded for part in parts), "padding_known": not any(part.unmatched for part in parts),
        "counts": {name: counts[name] for name in CLASSES}, "faults": sum(counts[name] for name in FAULTS),
        "future": counts["future"] if later else None, "padding": counts["padding"] if keys else None,
        "first_kept_share": sum(part.first_kept for part in parts) / number if keys and number else None,
        "load": _load(entry, margins["rows"]), "repeats": entry.repeats,
    }  # fmt: skip


def _margins(entry: OwnSelection) -> dict[str, Any]:
    """Return how many rows decide, by which margin, and how many are certified."""
    margin = torch.cat([part.margin for part in entry.parts])
    deciding = margin < torch.inf
    number = int(deciding.sum())
    certified = int((torch.cat([part.certified for part in entry.parts]) & deciding).sum())
    spread = percentiles(margin[deciding].numpy())
    return {
        "margin_of": "logits" if entry.parts[0].logits else "scores", "rows": len(margin), "deciding": number,
        "inactive": not number, "margin_median": spread["p50"], "margin_p5": spread["p5"],
        "ties": int((margin == 0).sum()), "certified": certified,
        "certified_share": certified / number if number else None,
    }  # fmt: skip


def _load(entry: OwnSelection, rows: int) -> dict[str, Any] | None:
    loads = [part.load for part in entry.parts if part.load is not None]
    if len(loads) < len(entry.parts) or not rows:
        return None
    shares = (torch.stack(loads).sum(0).double() / rows).tolist()
    ends = {"largest": max(shares), "smallest": min(shares), "even": entry.parts[0].k / len(shares)}
    return ends | {"unused": shares.count(0.0), "shares": shares}


def comparison_summary(
    compared: Sequence[ComparedSelections],
    file: str,
    against: str,
    provenance: dict[str, Any],
    facts: dict[str, Any],
) -> Summary:
    """Return what ``--json`` prints of the selections of two files."""
    rows = pd.concat([_placed(each, order) for order, each in enumerate(compared)], ignore_index=True)
    layers = _layer_table(rows)
    layers.insert(2, "k", [compared[order].k for order in layers.pop("selection")])
    diverged = layers[layers["changed"] > 0]
    lost = rows["lost"]
    classes = {name: int((rows["class"] == name).sum()) for name in (SAME, NUMERIC, BUG, UNEXPLAINED)}
    entry = {
        "file": file, "against": against, "tokens": compared[0].tokens, "heads": int(rows["head"].max()) + 1,
        "k": _common_k(compared), "format": compared[0].format, "rows": len(rows),
        "overlap": float(rows["overlap"].mean()), "changed": int((rows["overlap"] < 1).sum()), "classes": classes,
        "by_own_scores": _total_by_own_scores(compared), "layouts": list(compared[0].layouts),
        "ignored": list(compared[0].ignored),
        "first_layer": None if diverged.empty else int(diverged["layer"].iloc[0]),
        "first_module": None if diverged.empty else str(diverged["module"].iloc[0]),
        "lost": {"of": compared[0].weight_of, "mean": float(lost.mean()), "largest": float(lost.max())},
        "worst": _least_overlap(rows), "located": _located_entry(compared),
        "repeats": {
            "file": sum(each.repeats[0] for each in compared), "against": sum(each.repeats[1] for each in compared)
        },
        "layers": layers.to_dict("records"), "passed": not classes[BUG] + classes[UNEXPLAINED], **facts,
    }  # fmt: skip
    return _summary([entry], provenance)


def _located_entry(compared: Sequence[ComparedSelections]) -> dict[str, Any] | None:
    located = [each.located for each in compared if each.located is not None]
    return asdict(located[0]) if located else None


def _common_k(compared: Sequence[ComparedSelections]) -> int | None:
    return compared[0].k if all(each.k == compared[0].k for each in compared) else None


def _total_by_own_scores(compared: Sequence[ComparedSelections]) -> int | None:
    numbers = [each.by_own_scores for each in compared if each.by_own_scores is not None]
    return sum(numbers) if len(numbers) == len(compared) else None


def _placed(compared: ComparedSelections, order: int) -> pd.DataFrame:
    """Return rows with their module and its place; those of other numbers of tokens are other tokens."""
    return compared.rows.assign(module=compared.module, selection=order, tokens=compared.tokens)


def _layer_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each layer of each selection, in their order."""
    places = ["selection", "layer"]
    order = rows.groupby(places).ngroup()
    differs = rows["overlap"] < 1
    first = order[differs].groupby([rows["tokens"], rows["token"]]).min().value_counts()
    classes = {name: rows["class"] == name for name in (NUMERIC, BUG, UNEXPLAINED)}
    table = rows[["module", *places, "overlap", "lost"]].assign(rows=1, changed=differs, **classes)
    aggregations = {
        "rows": "sum",
        "overlap": "mean",
        "changed": "sum",
        **dict.fromkeys(classes, "sum"),
        "lost": "mean",
    }
    layers = table.groupby(["module", *places], as_index=False, sort=False).agg(aggregations)
    layers = layers.sort_values(places, ignore_index=True)
    layers.insert(6, "first", pd.Series(layers.index).map(first).fillna(0).astype("int64"))
    return layers


def _least_overlap(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the row with the smallest overlap; of several, the first that rounding does not explain."""
    explained = rows["class"].isin((SAME, NUMERIC)).to_numpy()
    row = rows.iloc[int(np.lexsort((explained, rows["overlap"].to_numpy()))[0])]
    place = {name: int(row[name]) for name in ("token", "layer", "head")}
    return {
        "module": str(row["module"]),
        **place,
        "overlap": float(row["overlap"]),
        "class": str(row["class"]),
        "lost": float(row["lost"]),
    }


_NUMBERS = ("worst_chosen", "kth", "gap", "gap_ulps", "left_out", "separation", "separation_ulps")


def check_summary(
    checked: Sequence[CheckedSelection], file: str, provenance: dict[str, Any], facts: dict[str, Any]
) -> Summary:
    """Return what ``--json`` prints of the checked selections of a file."""
    return _summary([_checked_entry(each, file) | facts for each in checked], provenance)


def _checked_entry(checked: CheckedSelection, file: str) -> dict[str, Any]:
    present = [name for name, number in checked.counts.items() if number]
    if checked.not_judged:
        present.append(NOT_JUDGED)
    facts = ("not_checked", "not_judged", "k", "keys", "format", "counts", "faults", "stale", "module")
    return {
        "file": file, "rows": len(checked.rows), **{name: getattr(checked, name) for name in facts},
        "passed": not checked.faults, "worst": _numbers(checked.worst),
        "worst_of_class": {name: _numbers(checked.worst_of(name)) for name in present},
    }  # fmt: skip


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    place = [int(value) for name, value in row.items() if name.startswith("dim_")]
    return {"row": place, "class": str(row["class"]), **{name: float(row[name]) for name in _NUMBERS}}
