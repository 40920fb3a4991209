"""How far two models' attention and outputs are apart: head by head, ranked, overall, and as a map."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings, Summary, json_ready, modules_by_layer, records
from semdiag.measuring.findings.resampling import Interval, sum_ratio_interval
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, interval_words, layer_name, number, number_from_json, percent, text
from semdiag.presenting.answer import Answer, Folded, Glance, Outcome, heading, with_facts
from semdiag.presenting.drawing.panels import NothingToDrawError, heat_map, name_cells
from semdiag.presenting.drawing.style import drawing, note_below, panel_grid
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.compare.measure import COMPARED, COMPARED_OUTPUTS

_RELATIVE = {"output_change": "change", "by_weights": "by_weights", "by_values": "by_values"}
_COLUMNS = [
    "model", "base", "layer", "head", "rank", "queries", "total_variation", "low", "high", "largest",
    "dispersion_base", "dispersion", "moved", "top_queries", "overlap", *_RELATIVE, "weights_share",
]  # fmt: skip


def change_table(findings: Findings) -> pd.DataFrame:
    """Return the changes of every head, of every layer (head ALL), and in total (both ALL)."""
    rows = []
    for (model, base), of_model in findings.measurements[COMPARED].groupby(["model", "base"], sort=False):
        names = {"model": model, "base": base}
        rows.append(names | {"layer": ALL, "head": ALL} | _described(of_model, interval=True))
        for layer, part in of_model.groupby("layer"):
            rows.append(names | {"layer": layer, "head": ALL} | _described(part, interval=True))
        for place, part in of_model.groupby(["layer", "head"]):
            rows.append(names | dict(zip(("layer", "head"), place, strict=True)) | _described(part))
    table = pd.DataFrame(rows, columns=[name for name in _COLUMNS if name != "rank"])
    heads = table[table["head"] != ALL]
    ranks = heads.groupby("model")["total_variation"].rank(method="first", ascending=False)
    return table.assign(rank=ranks.astype("Int64"))[_COLUMNS]


def head_ranking(findings: Findings) -> pd.DataFrame:
    """Return the rows of single heads by model, the largest total variation first."""
    table = findings(change_table)
    heads = table[table["head"] != ALL]
    return heads.sort_values(["model", "rank"], kind="stable", ignore_index=True)


def answer_table(findings: Findings) -> pd.DataFrame:
    """Return the changes of the outputs, one row per model."""
    rows = []
    for (model, base), of_model in findings.measurements[COMPARED_OUTPUTS].groupby(["model", "base"], sort=False):
        predictions, targets = int(of_model["predictions"].sum()), int(of_model["targets"].sum())
        divergence = _mean_of(of_model, "divergence", "predictions")
        rows.append(
            {
                "model": model, "base": base, "samples": len(of_model), "predictions": predictions,
                "changed": int(of_model["changed"].sum()),
                "divergence": divergence.estimate, "low": divergence.low, "high": divergence.high,
                "targets": targets,
                **{name: of_model[name].sum() / targets if targets else np.nan for name in ("loss_base", "loss")},
                "output_change": float(of_model["output_change"].mean()),
            }
        )  # fmt: skip
    columns = [
        "model", "base", "samples", "predictions", "changed", "divergence", "low", "high", "targets", "loss_base",
        "loss", "output_change",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def _described(rows: pd.DataFrame, interval: bool = False) -> dict[str, Any]:
    sums = rows.drop(columns=["model", "base", "sample", "layer", "head", "largest"]).sum()
    queries, top = int(sums["queries"]), int(sums["top_queries"])
    means = {name: sums[name] / queries for name in ("total_variation", "dispersion_base", "dispersion", "moved")}
    low_high = _mean_of(rows, "total_variation", "queries") if interval else Interval(np.nan, np.nan, np.nan)
    output, parts = sums["output"], sums["by_weights"] + sums["by_values"]
    return {
        "queries": queries, **means, "low": low_high.low, "high": low_high.high,
        "largest": float(rows["largest"].max()), "top_queries": top,
        "overlap": sums["overlap"] / top if top else np.nan,
        **{name: np.sqrt(sums[of] / output) if output > 0 else np.nan for name, of in _RELATIVE.items()},
        "weights_share": sums["by_weights"] / parts if parts > 0 else np.nan,
    }  # fmt: skip


def _mean_of(rows: pd.DataFrame, sums: str, counts: str) -> Interval:
    each = rows.groupby("sample")[[sums, counts]].sum().to_numpy(np.float64)
    interval = sum_ratio_interval(each[:, 0], each[:, 1], share=sums == "total_variation").if_varied()
    return Interval(interval.estimate, max(interval.low, 0.0), interval.high)  # neither quantity is negative


_ROUNDING, _NAMED = 1e-5, 5


def comparison_sentences(result: Summary, modules: Sequence[str] = ()) -> list[str]:
    """Return sentences on what changed from the base to the model."""
    whole, most = result["all"], result["heads"][0]
    samples = result["outputs"]["samples"] if result["outputs"] else None
    interval = interval_words(*_ends(whole), "{:.3g}".format, samples)
    sentences = [
        *_beginning(result["heads"], modules),
        f"Total variation of the weights: {number(whole['total_variation'])} in the mean of "
        f"{counted(whole['queries'], 'query')} ({interval}), {number(whole['largest'])} at most; most in layer "
        f"{layer_name(most['layer'], modules)}, head {most['head']}: {number(most['total_variation'])}."
        if whole["largest"]
        else f"The weights of all {whole['queries']:,} queries are the same.",
    ]
    if whole["output_change"] is not None:
        sentences.append(_parts(whole))
    return sentences + _outputs(result["outputs"])


def _beginning(heads: list[Summary], modules: Sequence[str]) -> list[str]:
    """Name the heads in which the change begins, if earlier layers or other heads of theirs are the same."""
    changed = [row for row in heads if max(row["largest"], row["output_change"] or 0) > _ROUNDING]
    first = min((row["layer"] for row in changed), default=0)
    began = sorted((row for row in changed if row["layer"] == first), key=lambda row: int(row["head"]))
    same = [row for row in heads if row["layer"] <= first and row not in began]
    if not began or not same:
        return []
    of = f"{'head' if len(began) == 1 else 'heads'} {', '.join(str(row['head']) for row in began[:_NAMED])}"
    of += " and more" if len(began) > _NAMED else ""
    most = max((row["output_change"] or 0 for row in began), default=0)
    before = "between the layer before and this one, or in it" if len(began) > 1 else "there"
    return [
        f"The change begins in layer {layer_name(first, modules)}, {of} (total variation "
        f"{number(max(row['largest'] for row in began))} at most, output {number(most)} of its norm): look for it "
        f"{before}. What precedes is the same; heads of later layers may change only by their input."
    ]


def _ends(row: Summary) -> tuple[float, float]:
    return number_from_json(row["low"]), number_from_json(row["high"])


def _parts(whole: Summary) -> str:
    change = f"Attention's outputs change by {number(whole['output_change'])} of their norm"
    if whole["weights_share"] is None:
        return f"{change}."
    return (
        f"{change}: the other weights alone change them by {number(whole['by_weights'])}, the other values by "
        f"{number(whole['by_values'])} ({percent(whole['weights_share'], '.0f', strict=True)} of both squares is "
        "the weights')."
    )


def _outputs(outputs: Summary | None) -> list[str]:
    if outputs is None:
        return []
    if not outputs["predictions"]:
        return [f"The model's outputs change by {number(outputs['output_change'])} of their norm, in the mean."]
    interval = interval_words(*_ends(outputs), "{:.3g}".format, outputs["samples"])
    sentences = [
        f"KL(A || B) of the model's outputs: {number(outputs['divergence'])} nats ({interval}); "
        f"{outputs['changed']:,} of {counted(outputs['predictions'], 'prediction')} change."
    ]
    before, after = number_from_json(outputs["loss_base"]), number_from_json(outputs["loss"])
    if not math.isnan(before + after):
        sentences.append(
            f"Loss of {counted(outputs['targets'], 'target')}: {before:.4g} nats before, {after:.4g} after."
        )
    return sentences


_FEW = 10  # heads, without --all
_SHOWN = (
    Column("rank", form=text), Column("layer", form=text), Column("head", form=text),
    Column("total_variation", drop=NEVER), Column("largest", drop=2), Column("dispersion_base", "δ of A"),
    Column("dispersion", "δ of B"), Column("moved", "|change|", drop=1), Column("overlap", "top-{} overlap"),
    Column("output_change"), Column("by_weights"), Column("by_values"),
)  # fmt: skip


def answer(findings: Findings) -> Answer:
    """Return what changed from the base to the model: the heads that changed most, every head, the whole model."""
    top = findings.measurements.provenance.get("compare_top")
    results = findings(comparisons)
    modules = {model: findings(modules_by_layer, model) for model in results}
    opening = {model: comparison_sentences(result, modules[model]) for model, result in results.items()}
    shown: list[str | NumberTable | Folded] = []
    for model, result in results.items():
        sizes = f"{counted(len(result['layers']), 'layer')}, {counted(len(result['heads']), 'head')}"
        shown.append(f"\nA: {result['base']}\nB: {model}\n{sizes}, {counted(result['all']['queries'], 'query')}")
        whole = {**result["all"], "rank": "all", "layer": "", "head": ""}
        heads = [{**row, "layer": layer_name(row["layer"], modules[model])} for row in result["heads"]]
        tables = [NumberTable(_SHOWN, [*heads[:most], whole], unit=top) for most in (_FEW, None)]
        further = len(result["heads"]) - _FEW
        more = [f"{further} further heads: --all shows them."] if further > 0 else []
        shown.append(Folded([tables[0], *more], tables[1:]))
    last = [*results.values()][-1]["all"]
    queries = counted(last["queries"], "query")
    return Answer(
        Glance(
            Outcome.MEASURED,
            f"{last['total_variation']:.3g}",
            f"total variation of attention's weights from A to B, mean over {queries}",
        ),
        [f"A: {results[model]['base']}; B: {model}. {' '.join(words)}" for model, words in opening.items()],
        tables={
            "compare": with_facts(findings, findings(change_table)),
            "compare_outputs": with_facts(findings, findings(answer_table)),
        },
        results=results,
        more={"top": top},
        shown=shown,
        opening=[sentence for sentences in opening.values() for sentence in sentences],
    )


def comparisons(findings: Findings) -> dict[str, Summary]:
    """Return the changes from the base to each model."""
    changes, ranking, answers = findings(change_table), findings(head_ranking), findings(answer_table)
    results = {}
    for model, changed in changes.groupby("model", sort=False):
        plain = changed.drop(columns=["model", "base", "rank"])
        layers = plain[(plain["head"] == ALL) & (plain["layer"] != ALL)].drop(columns="head")
        heads = ranking[ranking["model"] == model].drop(columns=["model", "base", "low", "high"])
        outputs = records(answers[answers["model"] == model].drop(columns=["model", "base"]))
        results[str(model)] = json_ready(
            {
                "base": changed["base"].iloc[0],
                "all": records(plain[plain["layer"] == ALL].drop(columns=["layer", "head"]))[0],
                "outputs": outputs[0] if outputs else None,
                "layers": records(layers),
                "heads": records(heads),
            }
        )
    return results


_WRITTEN = 12  # with more layers or heads, numbers in the cells would be illegible
_QUANTITIES = {
    "total_variation": "total variation of the weights",
    "overlap": "overlap of the top-{top}",
    "by_weights": "change of the output by the weights",
    "by_values": "change of the output by the values",
}
_ONE_SCALE = "by_weights", "by_values"


@drawing(
    "Coloured cells, layers by heads: how far the attention of two models is apart on the same inputs, and what "
    "of the change of its output is the weights' and the values': {shown}.",
    "A dark cell in the first panel is a head that attends elsewhere than it did. Where the change of the output "
    "by the values is darker than that by the weights, the head looks where it did and finds something else.",
)
def compare_map(findings: Findings) -> Figure:
    """Draw the total variation, the overlap of the top-k, and both parts of the output's change, of every head."""
    table = findings(head_ranking)
    if table.empty:
        raise NothingToDrawError("No two models were compared.")
    of_model = table[table["model"] == table["model"].iloc[-1]]
    quantities = [name for name in _QUANTITIES if of_model[name].notna().any()]
    heads = of_model["head"].nunique()
    figure, axes = panel_grid(len(quantities), height=1.0 + 0.2 * min(max(heads, 4), 40), sharey=False, columns=2)
    top = findings.measurements.provenance.get("compare_top", "k")
    for ax, name in zip(axes, quantities, strict=True):
        _draw(ax, of_model, name)
        ax.set_title(_QUANTITIES[name].format(top=top), fontsize=9)
    note_below(
        figure,
        "A cell is a head of a layer: means over its queries; changes of its output relative to the norm of A's. "
        "Grey: not measured or undefined.",
    )
    return figure


def _draw(ax: Axes, heads: pd.DataFrame, name: str) -> None:
    cells = heads.pivot(index="head", columns="layer", values=name)
    values = cells.to_numpy(float)
    both_parts = heads[list(_ONE_SCALE)].to_numpy(float) if name in _ONE_SCALE else values
    low, high = (float(np.nanmin(values)), 1.0) if name == "overlap" else (0.0, float(np.nanmax(both_parts)))
    scale = Normalize(low, high if high > low else low + 1.0)
    heat_map(ax, values, scale, "{:.2g}".format if max(cells.shape) <= _WRITTEN else None)
    name_cells(ax.xaxis, list(cells.columns))
    name_cells(ax.yaxis, list(cells.index))
    ax.set_xlabel("layer")
    ax.set_ylabel("head")


HEADINGS = heading(
    "compare", "What changed from the base to the model?", (compare_map,),
    "Each model runs by itself: from the second layer on, a head's change includes that of its input. It does not "
    "say which weights were changed.",
    "The weights follow from the queries and keys of each model, without what a kernel rounds in its softmax. "
    "Both parts of the output's change add up to it as vectors; their norms do not.",
)  # fmt: skip
