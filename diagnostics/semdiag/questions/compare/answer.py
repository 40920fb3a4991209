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
from semdiag.presenting.answer import Answer, Claim, Collapsible, Glance, Outcome, Part, Shown, heading, with_facts
from semdiag.presenting.drawing.panels import NothingToDrawError, heat_map, name_cells
from semdiag.presenting.drawing.style import drawing, note_below, panel_grid
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.compare.measure import COMPARED, COMPARED_OUTPUTS

_RELATIVE = {"output_change": "change", "by_weights": "by_weights", "by_values": "by_values"}
_COLUMNS = [
    "model", "base", "layer", "head", "rank", "queries", "total_variation", "low", "high", "largest",
    "dispersion_base", "dispersion", "moved", "top_queries", "overlap", *_RELATIVE, "weights_share",
]  # fmt: skip


def comparison_table(findings: Findings) -> pd.DataFrame:
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
    table = findings(comparison_table)
    heads = table[table["head"] != ALL]
    return heads.sort_values(["model", "rank"], kind="stable", ignore_index=True)


def answer_table(findings: Findings) -> pd.DataFrame:
    """Return the changes of the outputs, one row per model."""
    rows = []
    for (model, base), of_model in findings.measurements[COMPARED_OUTPUTS].groupby(["model", "base"], sort=False):
        predictions = int(of_model["predictions"].sum())
        targets = int(of_model["targets"].sum())
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
    queries = int(sums["queries"])
    top = int(sums["top_queries"])
    means = {name: sums[name] / queries for name in ("total_variation", "dispersion_base", "dispersion", "moved")}
    low_high = _mean_of(rows, "total_variation", "queries") if interval else Interval(np.nan, np.nan, np.nan)
    output = sums["output"]
    parts = sums["by_weights"] + sums["by_values"]
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


_ROUNDING = 1e-5
_NAMED = 5  # heads in which a change begins


def comparison_claims(model: str, result: Summary, modules: Sequence[str] = ()) -> list[Claim]:
    """Return claims on what changed from the base to the model."""
    return [
        *_beginning(model, result["heads"], modules),
        *_weights_claims(model, result, modules),
        *_attention_output(model, result["all"]),
        *_outputs(model, result["outputs"]),
    ]


def _weights_claims(model: str, result: Summary, modules: Sequence[str]) -> list[Claim]:
    pooled = result["all"]
    if not pooled["largest"]:
        return [Claim("weights", f"The weights of all {pooled['queries']:,} queries are the same.", model, 0.0)]
    first = result["heads"][0]
    samples = result["outputs"]["samples"] if result["outputs"] else None
    ends = _ends(pooled)
    mean = pooled["total_variation"]
    place = f"layer {layer_name(first['layer'], modules)}, head {first['head']}"
    sentence = f"{_share_words(mean)} of the attention weight moves from A to B, most in {place}."
    details = (
        f"Total variation of the weights: {number(mean)} in the mean of {counted(pooled['queries'], 'query')} "
        f"({interval_words(*ends, _three_digits, samples)}), {number(pooled['largest'])} at most; in {place}: "
        f"{number(first['total_variation'])}."
    )
    return [
        Claim("weights", sentence, model, mean, "total variation", ends),
        Claim("weights-by-query", details, model, pooled["largest"], "total variation"),
    ]


def _share_words(share: float) -> str:
    """Return a share in per cent, of a small one two digits: "12%", "0.0021%"."""
    return f"{100 * share:.2g}%" if share < 0.1 else f"{share:.0%}"


def _beginning(model: str, heads: list[Summary], modules: Sequence[str]) -> list[Claim]:
    """Name the heads in which the change begins, if earlier layers or other heads of theirs are the same."""
    changed = [row for row in heads if max(row["largest"], _output_change(row)) > _ROUNDING]
    layer = min((row["layer"] for row in changed), default=0)
    first = sorted((row for row in changed if row["layer"] == layer), key=lambda row: int(row["head"]))
    unchanged = [row for row in heads if row["layer"] <= layer and row not in first]
    if not first or not unchanged:
        return []
    most = max(_output_change(row) for row in first)
    place = "in that head" if len(first) == 1 else "between the layer before and this one, or in it"
    sentence = f"The change begins in layer {layer_name(layer, modules)}, {_head_names(first)}."
    details = (
        f"The total variation is {number(max(row['largest'] for row in first))} there at most, the output "
        f"changes by {number(most)} of its norm: look {place}. What precedes is the same; heads of later layers "
        "may change only by their input."
    )
    return [Claim("beginning", sentence, model, layer, "layer"), Claim("beginning-place", details, model, most)]


def _output_change(row: Summary) -> float:
    return row["output_change"] or 0.0


def _head_names(heads: list[Summary]) -> str:
    names = ", ".join(str(row["head"]) for row in heads[:_NAMED])
    if len(heads) > _NAMED:
        names += " and more"
    return f"head {names}" if len(heads) == 1 else f"heads {names}"


def _ends(row: Summary) -> tuple[float, float]:
    return number_from_json(row["low"]), number_from_json(row["high"])


_three_digits = "{:.3g}".format


def _what_moved(weights_share: float) -> str:
    """Return which part of a change is at least twice the other, in squares."""
    if weights_share <= 1 / 3:
        return "mostly the values moved, not the weights"
    if weights_share >= 2 / 3:
        return "mostly the weights moved, not the values"
    return "weights and values moved"


def _attention_output(model: str, pooled: Summary) -> list[Claim]:
    """Return how much attention's outputs change, by the weights and by the values."""
    if pooled["output_change"] is None:
        return []
    words = f"Attention's outputs change by {number(pooled['output_change'])} of their norm"
    if pooled["weights_share"] is not None:
        share = percent(pooled["weights_share"], ".0f", strict=True)
        words += (
            f": {_what_moved(pooled['weights_share'])} ({share} of both squares; the weights alone change them by "
            f"{number(pooled['by_weights'])}, the values by {number(pooled['by_values'])})"
        )
    return [Claim("attention-output", f"{words}.", model, pooled["output_change"], "share of the norm")]


def _outputs(model: str, outputs: Summary | None) -> list[Claim]:
    """Return how much the model's outputs change, and its loss."""
    if outputs is None:
        return []
    if not outputs["predictions"]:
        sentence = f"The model's outputs change by {number(outputs['output_change'])} of their norm, in the mean."
        return [Claim("outputs", sentence, model, outputs["output_change"], "share of the norm")]
    ends = _ends(outputs)
    sentence = (
        f"KL(A || B) of the model's outputs: {number(outputs['divergence'])} nats "
        f"({interval_words(*ends, _three_digits, outputs['samples'])}); "
        f"{outputs['changed']:,} of {counted(outputs['predictions'], 'prediction')} change."
    )
    claims = [Claim("divergence", sentence, model, outputs["divergence"], "nats", ends)]
    before = number_from_json(outputs["loss_base"])
    after = number_from_json(outputs["loss"])
    if not math.isnan(before + after):
        targets = counted(outputs["targets"], "target")
        sentence = f"Loss of {targets}: {before:.4g} nats before, {after:.4g} after."
        claims.append(Claim("loss", sentence, model, after - before, "nats"))
    return claims


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
    opening: list[Claim] = []
    names: list[Claim] = []
    shown: list[Shown] = []
    for model, result in results.items():
        modules = findings(modules_by_layer, model)
        opening += comparison_claims(model, result, modules)
        names.append(Claim("models", f"A: {result['base']}; B: {model}.", model))
        sizes = f"{counted(len(result['layers']), 'layer')}, {counted(len(result['heads']), 'head')}"
        shown.append(f"\nA: {result['base']}\nB: {model}\n{sizes}, {counted(result['all']['queries'], 'query')}")
        shown.append(_head_tables(result, modules, top))
    last = [*results.values()][-1]["all"]
    words = f"total variation of attention's weights from A to B, mean over {counted(last['queries'], 'query')}"
    return Answer(
        Glance(Outcome.MEASURED, f"{last['total_variation']:.3g}", words),
        [*opening, *names],
        tables={
            "compare": with_facts(findings, findings(comparison_table)),
            "compare_outputs": with_facts(findings, findings(answer_table)),
        },
        results=results,
        more={"top": top},
        shown=shown,
        opening=opening,  # the tables name the models
    )


def _head_tables(result: Summary, modules: Sequence[str], top: int | None) -> Collapsible:
    """Return a row a head, the most changed first, and the whole model; collapsed: few heads."""
    pooled = {**result["all"], "rank": "all", "layer": "", "head": ""}
    heads = [{**row, "layer": layer_name(row["layer"], modules)} for row in result["heads"]]
    collapsed: list[Part] = [NumberTable(_SHOWN, [*heads[:_FEW], pooled], unit=top)]
    if len(heads) > _FEW:
        collapsed.append(f"{len(heads) - _FEW} further heads: --all shows them.")
    return Collapsible(collapsed, [NumberTable(_SHOWN, [*heads, pooled], unit=top)])


def comparisons(findings: Findings) -> dict[str, Summary]:
    """Return the changes from the base to each model."""
    changes = findings(comparison_table)
    ranking = findings(head_ranking)
    answers = findings(answer_table)
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
