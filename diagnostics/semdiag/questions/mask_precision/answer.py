"""What a number format does to masks: by model, format and layer, pooled, in words, and drawn."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import DENSE, KINDS
from semdiag.measuring.findings.findings import Findings, Summary, records
from semdiag.measuring.findings.resampling import sum_ratio_interval
from semdiag.measuring.table import ALL, Table, rows_of_model
from semdiag.measuring.words import count, counted, interval, percent, percent_span, plain, text
from semdiag.presenting.answer import Answer, Claim, Glance, Outcome, heading, with_facts
from semdiag.presenting.drawing.panels import NothingToDrawError, model_labels, panels_of
from semdiag.presenting.drawing.style import drawing, finished, number_layers, panel_grid
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.mask_precision.measure import LOST_WEIGHTS, ROUNDED_MASKS
from semdiag.questions.mask_stability.measure import MASKS

_SHARES = ("changed", "tied", "changed_or_tied", "certified")
_COUNTS = ("queries", "not_covered", "certified_rows", "certified_changed")
_COLUMNS = [
    "model", "format", "layer", *_COUNTS, *(name + end for name in _SHARES for end in ("", "_low", "_high")),
    "lost_p50", "lost_mean", "why",
]  # fmt: skip


def precision_table(findings: Findings) -> pd.DataFrame:
    """Return how many masks survive, by model, number format and layer, and pooled; heads are pooled."""
    masks = findings.measurements[ROUNDED_MASKS]
    lost = findings.measurements[LOST_WEIGHTS]
    rows = []
    for (model, kind), rows_of_format in masks.groupby(["model", "format"], sort=False):
        of_changed = lost[(lost["model"] == model) & (lost["format"] == kind)]
        by_layer = [(int(str(layer)), part) for layer, part in rows_of_format.groupby("layer", sort=True)]
        for layer, part in (*by_layer, (ALL, rows_of_format)):
            weights = of_changed if layer == ALL else of_changed[of_changed["layer"] == layer]
            rows.append({"model": model, "format": kind, "layer": layer, **_described(part, weights["lost"])})
    return pd.DataFrame(rows, columns=_COLUMNS)


def precision_of(findings: Findings, model: str) -> list[Summary]:
    """Return what each number format does to a model's masks, as in ``--json``."""
    table = findings(precision_table)
    of_model = table[table["model"] == model]
    formats: list[Summary] = []
    for kind, rows in of_model.groupby("format", sort=False):
        entries = records(rows.drop(columns=["model", "format"]).astype({"layer": object}))
        formats.append({"format": kind, "layers": entries[:-1], "all": entries[-1] | {"layer": "all"}})
    return formats


def _described(part: pd.DataFrame, lost: "pd.Series[float]") -> dict[str, Any]:
    counts = part.groupby("sample")[["queries", "not_covered", *_SHARES]].sum().astype(np.float64)
    covered = (counts["queries"] - counts["not_covered"]).to_numpy()
    estimates: dict[str, float] = {}
    for name in _SHARES:
        share = sum_ratio_interval(counts[name].to_numpy(), covered, share=True).if_varied()
        estimates |= share.columns(name)
    return {
        "queries": int(part["queries"].sum()), "not_covered": int(part["not_covered"].sum()),
        "certified_rows": int(part["certified"].sum()),
        "certified_changed": int(part["certified_changed"].sum()), **estimates, "lost_p50": float(lost.median()),
        "lost_mean": float(lost.mean()), "why": "; ".join(sorted({*part["why"]} - {""})),
    }  # fmt: skip


def precision_glance(findings: Findings) -> Glance:
    """Return how many masks change in the format that was named first."""
    table = findings(precision_table)
    rows = table[(table["layer"] == ALL) & table["changed"].notna()]
    if rows.empty:
        words = "have a mask that the error model covers"
        return Glance(Outcome.OPEN, "0 models", words, claim_id="changed")
    first = rows["format"].iloc[0]
    rows = rows[rows["format"] == first]
    words = (
        f"of the masks of {counted(len(rows), 'model')} change in {first}, however ties are broken; "
        f"{int(rows['certified_changed'].sum()):,} of {int(rows['certified_rows'].sum()):,} certified ones changed"
    )
    return Glance(Outcome.MEASURED, percent_span(list(rows["changed"])), words, claim_id="changed")


def certified_words(row: Summary) -> str:
    """Return how many certified rows of a format changed or tied, in words; none may."""
    changed = row["certified_changed"]
    fault = ", which is an error of semdiag" if changed else ""
    return f"Certified rows that changed: {changed:,} of {row['certified_rows']:,}{fault}."


_fine_percent = partial(percent, form=".2f")
_percent_interval = partial(interval, factor=100)
_SHOWN = (
    Column("format", form=text), Column("layer", form=plain),
    Column("queries not_covered", "rows", lambda queries, not_covered: count(queries - not_covered)),
    Column("certified", form=lambda share: "not covered" if share is None else percent(share), drop=NEVER),
    Column("changed", form=_fine_percent, drop=NEVER),
    Column("changed_low changed_high", "changed 95%", _percent_interval, drop=1),
    Column("tied", form=_fine_percent, drop=NEVER), Column("changed_or_tied", form=_fine_percent),
    Column("lost_p50", "weight lost p50"), Column("lost_mean", "mean", drop=2),
)  # fmt: skip


def precision_parts(formats: list[Summary], model: str) -> Iterator[Claim | NumberTable]:
    """Yield how one model's masks change, a row for each format and layer, and what was certified."""
    yield NumberTable(
        _SHOWN, [{"format": one["format"], **row} for one in formats for row in [*one["layers"], one["all"]]]
    )
    for one in formats:
        row = one["all"]
        words = []
        if row["queries"] > row["not_covered"]:
            words.append(certified_words(row))
        if row["not_covered"]:
            rows = counted(row["queries"], "row")
            words.append(f"Not covered: {row['not_covered']:,} of {rows} ({row['why']}).")
        sentence = f"{one['format']}: {' '.join(words)}"
        yield Claim(f"certified-{one['format']}", sentence, model, row["certified_changed"], "rows")


def mask_words(findings: Findings, model: str) -> str:
    """Return which mask of a model was judged, or why none was."""
    measurements = findings.measurements
    kind = str(rows_of_model(measurements.models, model)["attention"].iloc[0])
    if kind not in KINDS or KINDS[kind].keeps in ("fixed", "redrawn"):
        return f"not applicable: the mask of {kind} attention does not depend on the input"
    kept_keys = pd.concat(
        [t.loc[t["model"] == model, "kept"] for t in (measurements[MASKS], measurements[ROUNDED_MASKS])]
    )
    if kept_keys.empty:
        return next(iter(refusals(findings, model)), "no query drops a key: no mask can change")
    low = kept_keys.min()
    high = kept_keys.max()
    if kind in DENSE:
        return f"the model selects no keys: this is the mask that top-{low} would choose from its scores"
    return f"the model's own mask, {f'{low} to {high} keys' if low < high else f'k = {low}'}"


def refusals(findings: Findings, model: str) -> list[str]:
    """Return why a model's masks were not tested under noise or number formats although requested."""
    remarks = findings.measurements.remarks
    codes = remarks["code"].isin(["no-mask-stability", "no-mask-precision"])
    return [str(text) for text in remarks["text"][(remarks["model"] == model) & codes]]


def answer(findings: Findings) -> Answer:
    """Return how many masks survive each number format; the page of mask stability shows it."""
    table = findings(precision_table)
    layer = table["layer"].astype(object).mask(table["layer"] == ALL, "all")
    tables = {"mask_precision": with_facts(findings, table.assign(layer=layer))} if len(table) else {}
    glance = precision_glance(findings)
    details: list[Claim | NumberTable] = []
    for model, label in model_labels(findings.measurements.models).items():
        words = mask_words(findings, model)
        formats = precision_of(findings, model)
        if formats:
            details += [Claim("mask", f"{label}: {words}.", model), *precision_parts(formats, model)]
        else:
            refusal = next(iter(refusals(findings, model)), words)
            details.append(Claim("mask", f"{label}: {refusal}.", model))
    return Answer(glance, [glance.claim] if len(table) else [], details, tables=tables)


_MARKERS = "osD^vP*Xh<>"  # of noise levels or formats


@dataclass(frozen=True)
class _SurvivalCurve:
    """The masks of a model at a noise level or in a format, by layer."""

    rows: pd.DataFrame
    color: str
    marker: str
    label: str


def _survival_panels(findings: Findings, table: Table, rows: pd.DataFrame) -> dict[str, list[_SurvivalCurve]]:
    """Return the curves of each panel by title: models of a task and seed share one, unless each has several."""
    measurements = findings.measurements
    set_sizes = measurements[table].groupby("model")["kept"].last()
    names = list(dict.fromkeys(rows["curve"]))
    shades = _shades(len(names)) if len(names) > 1 else []
    panels: dict[str, list[_SurvivalCurve]] = {}
    for panel in panels_of(measurements.models):
        for series in panel.series:
            if series.model not in set_sizes.index:
                continue
            supposed = f": top-{set_sizes[series.model]} it would choose" if series.attention in DENSE else ""
            label = f"{series.label}{supposed}"
            of_model = rows[rows["model"] == series.model]
            if len(names) == 1:
                curve = _SurvivalCurve(of_model, series.style.color, series.style.marker, label)
                panels.setdefault(panel.title, []).append(curve)
                continue
            panels[f"{panel.title}\n{label}"] = [
                _SurvivalCurve(of_model[of_model["curve"] == name], shade, _MARKERS[at % len(_MARKERS)], name)
                for at, (name, shade) in enumerate(zip(names, shades, strict=True))
            ]
    if not panels:
        raise NothingToDrawError("No mask of these models depends on the input, so none can change.")
    return panels


def _shades(count: int) -> list[str]:
    """Return colours from light to dark, which the colour-blind can tell apart."""
    import seaborn as sns  # takes a second

    shades: list[str] = sns.color_palette("viridis_r", count + 1).as_hex()[1:]
    return shades


def draw_survival(findings: Findings, table: Table, rows: pd.DataFrame, note: str) -> Figure:
    """Draw against layers the share of masks that stay the same, with its ends, and the certified share."""
    panels = _survival_panels(findings, table, rows)
    figure, axes = panel_grid(len(panels), height=2.6)
    for ax, (name, curves) in zip(axes, panels.items(), strict=True):
        for curve in curves:
            layers = curve.rows["layer"].to_numpy(int)
            ax.plot(
                layers, curve.rows["same"], color=curve.color, marker=curve.marker, markersize=4, label=curve.label
            )
            ax.fill_between(
                layers, curve.rows["low"], curve.rows["high"], color=curve.color, alpha=0.25, linewidth=0
            )
            ax.plot(layers, curve.rows["certified"], color=curve.color, linestyle=":", linewidth=1.3)
        number_layers(ax, sorted({int(layer) for curve in curves for layer in curve.rows["layer"]}))
        ax.set_ylim(0, 1.03)
        ax.set_title(name, fontsize=9)
    axes[0].set_ylabel("share of masks unchanged, S′ = S")
    names = rows["curve"].unique()
    single_curve = f"{str(names[0]).capitalize()}. " if len(names) == 1 else ""
    return finished(figure, f"{single_curve}Heads pooled; dotted: certified to be unchanged. {note}.")


@drawing(
    "Share of queries whose mask is the same in float64 and rounded to a number format, per layer, certified "
    "share dotted: {shown}.",
    "The band of a format is due to ties at the boundary, which engines break in their own ways. The dotted share "
    "is proven: no engine within the error model changes it.",
)
def masks_in_formats(findings: Findings) -> Figure:
    """Draw the share of masks that stay the same, a curve for each number format against layers."""
    table = findings(precision_table)
    same = 1 - table["changed"]
    without_ties = 1 - table["changed_or_tied"]
    table = table.assign(curve=table["format"], same=same, low=without_ties, high=same)
    note = "Queries, keys and scores rounded once, against float64. Bands: down to the share without a tie at the "
    note += "boundary. Without rows that are not covered"
    return draw_survival(findings, ROUNDED_MASKS, table[table["layer"] != ALL], note)


HEADINGS = heading(
    "mask-precision", "Do masks survive a number format?", (masks_in_formats,),
    "Certified: no rounding of operands, sum and score can move a kept score below a dropped one, or level with "
    "it. The proof holds for an error model (docs/theory.md), not for an engine's bugs.",
    "The error model rounds queries and keys without a scale, adds in float32 (an engine that adds in fp16 or "
    "bf16 can exceed it) and rounds the scaled score once more. Rows with a bias, a soft-cap or sinks are not "
    "covered, and are left out of every share.",
    "Rounding is not passed on from layer to layer. A full-attention model is judged by the mask that top-k would "
    "choose.",
)  # fmt: skip
