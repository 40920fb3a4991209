"""What an indexer keeps and costs, in a sentence and a table."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from semdiag.measuring.findings.findings import Summary, json_ready, schema
from semdiag.measuring.words import UNKNOWN, Value, counted, decimals, number_from_json, percent, text
from semdiag.presenting.answer import Answer, Claim
from semdiag.presenting.tables import Column, NumberTable
from semdiag.selections.price import MASKS

if TYPE_CHECKING:
    from semdiag.questions.indexer.measure import PricedFit

_CONVERGED = 0.02  # relative fall of the divergence in the second half of a fit, up to which it has converged
_NAMES = {
    "indexer": "indexer", "topk": "exact top-k of each head", "topk-layer": "exact top-k of each layer",
    "window": "newest keys and four first", "random": "random",
}  # fmt: skip
_share = partial(percent, form=".3g")


def _change(share: Value) -> str:
    """Return a change in per cent; of very small ones two digits."""
    value = 100 * number_from_json(share)
    if math.isnan(value):
        return UNKNOWN
    return f"{value:,.0f}%" if abs(value) >= 100 else f"{decimals(value, 1)}%"


_TABLE = (
    Column("name", "keys", text), Column("kept", "weight kept", _share), Column("recall", form=_share),
    Column("loss_change", "change of loss", partial(decimals, places=4)),
    Column("perplexity_change", "of perplexity", _change),
)  # fmt: skip


def indexer_summary(priced: "PricedFit") -> Summary:
    """Return what ``--json`` prints."""
    fit = priced.fit
    price = priced.price
    means = price.heads.groupby("mask")[["kept", "recall"]].mean()
    masks = [
        {
            "mask": mask, "kept": float(means["kept"][mask]), "recall": float(means["recall"][mask]),
            "loss": price.loss(mask), "loss_change": price.loss(mask) - price.loss("none"),
            "perplexity_change": price.perplexity(mask),
        }
        for mask in MASKS
    ]  # fmt: skip
    by_mask = price.heads.pivot_table("kept", "module", "mask", sort=False)[list(MASKS)]
    entry = {
        "model": priced.model, "k": priced.k, "width": price.width,
        "heads": max(indexer.weight.out_features for indexer in fit.indexers.values()),
        "passes": fit.options.passes, "fitted_texts": fit.texts, "held_out_texts": len(priced.texts.held_out),
        "short_texts": priced.texts.short, "repeated_texts": priced.texts.repeated,
        "tokens": int(price.masks["targets"]["none"]), "loss": price.loss("none"), "share": price.share,
        "masks": masks, "divergence": price.divergence, "divergence_in_fit": fit.held_out,
        "converged": converged(fit.held_out),
        "layers": by_mask.reset_index().to_dict("records"),
    }  # fmt: skip
    return Summary(json_ready({"schema": schema("indexer"), "provenance": priced.provenance, "results": [entry]}))


def converged(held_out: list[float]) -> bool | None:
    """Return whether the divergence on held-out texts, half way and at the end, no longer falls; None: unknown."""
    if len(held_out) != 2:
        return None
    half_way, end = held_out
    return end > (1 - _CONVERGED) * half_way


def indexer_answer(summary: Summary) -> Answer:
    """Return the price in one sentence, whether the fit has come to its end, and the table."""
    (result,) = summary["results"]
    rows = [{**row, "name": _NAMES[row["mask"]]} for row in result["masks"]]
    size = f"{counted(result['heads'], 'head')}, fitted to {counted(result['fitted_texts'], 'text')}"
    title = f"\n{result['model']}: k = {result['k']:,}, indexers of {result['width']} dimensions, {size}"
    claims = [Claim("price", _price(result)), Claim("converged", _end_of_fit(result))]
    return Answer(opening=claims, shown=[title, NumberTable(_TABLE, rows), *_left_out(result)])


def _price(result: dict[str, Any]) -> str:
    by_mask = {row["mask"]: _change(row["perplexity_change"]) for row in result["masks"]}
    texts = f"{counted(result['held_out_texts'], 'held-out text')}, {counted(result['tokens'], 'token')}"
    costs = f"costs {by_mask['indexer']} perplexity where exact top-k costs {by_mask['topk']}"
    return (
        f"An indexer of {result['width']} dimensions keeps {percent(result['share'], form='.0f')} of the weight "
        f"that exact top-k keeps, and {costs}: {texts}."
    )


def _end_of_fit(result: dict[str, Any]) -> str:
    if result["converged"] is None:
        return "Whether the fit has converged is unknown: it takes two texts to tell."
    half_way, end = result["divergence_in_fit"]
    numbers = f"from {decimals(half_way, 3)} nats half way to {decimals(end, 3)}"
    if result["converged"]:
        return f"The fit has converged: KL on held-out texts went {numbers}."
    return f"The fit has not converged: KL on held-out texts fell {numbers}. More texts or --passes may cost less."


def _left_out(result: dict[str, Any]) -> list[str]:
    sentences = []
    if result["short_texts"]:
        sentences.append(f"Left out: {counted(result['short_texts'], 'text')} of k tokens or fewer.")
    if result["repeated_texts"]:
        sentences.append(f"Left out: {counted(result['repeated_texts'], 'text')} that stood there before.")
    return sentences
