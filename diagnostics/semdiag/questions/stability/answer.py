"""Does ξ bound the changes of softmax rows? Both forms against measured secants and local constants."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from semdiag.capturing.attention_call import BOUNDED, DENSE, FIXED_MASKS
from semdiag.mathematics.paper_stability import paper_fixed_mask_stability, paper_form_threshold
from semdiag.mathematics.softmax_stability import fixed_mask_stability
from semdiag.measuring.findings.estimates import all_by_name, without
from semdiag.measuring.findings.findings import (
    Finding,
    Findings,
    Summary,
    Verdict,
    compared_pairs,
    json_ready,
    of_rows,
    verdicts_of,
)
from semdiag.measuring.findings.resampling import Interval, rank_correlation_interval, ratio_interval
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, interval_words, number, percent, plain
from semdiag.presenting.answer import (
    MOST_LINES,
    Answer,
    Claim,
    Glance,
    Outcome,
    Shown,
    heading,
    title,
    verdict_line,
    verdict_table,
    with_facts,
)
from semdiag.presenting.drawing.panels import NothingToDrawError, model_labels, short_labels
from semdiag.presenting.drawing.style import (
    ATTENTION_STYLES,
    DENSE_STYLES,
    FAINT,
    INK,
    attention_style,
    drawing,
    finished,
    lightened,
    panel_grid,
    plain_numbers,
    title_with_facts,
)
from semdiag.presenting.tables import Column, NumberTable
from semdiag.questions.stability.gains import GAINS
from semdiag.questions.stability.measure import SECANTS, query_stability, with_bounds

RESAMPLES = 300
SECANT_CLAIM = "‖p − p'‖₁ ≤ ξ ‖z − z'‖₁ on the measured pairs"
ROWS = "‖p − p'‖₁ ≤ row constant · ‖z − z'‖_∞ on the measured pairs"
OF_PAIR = "sound, of the pair"
LOCAL = "local ξ_loc ≤ ξ*(δ, k)"
UNKNOWN = "ξ bounds the measured secants"  # of a kind of attention without a ξ
_LOG_HALF = math.log(0.5)
_SLACK = 1e-9  # relative, of quantities in float64
_TOLERANCE = {"float32": 1e-3, "float64": 1e-9}  # relative, of ξ_loc against ξ* from rounded scores
_HALF = 1e-2  # the same for models in half precision


def stability_findings(findings: Findings) -> list[Finding]:
    """Judge every form of ξ on every measured model; without secants, the local constants alone."""
    measurements = findings.measurements
    tolerance = _TOLERANCE.get(measurements.provenance.get("dtype", "float32"), _HALF)
    results = []
    for row in measurements.models.to_dict("records"):
        measured = measurements.of(row["model"])
        results.append(_local(row["model"], measured.queries, tolerance))
        if measured[SECANTS].empty:
            continue
        if row["attention"] not in BOUNDED:
            note = f"no ξ is known for {row['attention']} attention but of pairs that keep their set; secants and "
            note += "response are still given"
            results.append(Finding(row["model"], UNKNOWN, "", "all", Verdict.NOT_MET, {}, note))
            rows = with_bounds(measured[SECANTS], row["attention"])
            of_pair = _secants(row["model"], rows, OF_PAIR, "ln_pair", "score_change")
            note = "where noise changed the set, none is known" if of_pair.numbers["not_met"] else ""
            results.append(replace(of_pair, note=note))
            continue
        rows = with_bounds(measured[SECANTS], row["attention"])
        distances = ((OF_PAIR, "ln_pair"), ("sound", "ln_sound"), ("paper", "ln_paper"))
        results += [_secants(row["model"], rows, form, bound, "score_change") for form, bound in distances]
        results.append(_secants(row["model"], rows, "sound, row form", "ln_row", "score_change_max"))
    return results


def _secants(model: str, rows: pd.DataFrame, form: str, bound: str, distance: str) -> Finding:
    log_bound = rows[bound].to_numpy()
    fixed = _fixed(rows, bound)
    not_met = _not_met(rows, bound)
    violated = exceeding(rows, bound, distance)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        promised = np.exp(log_bound) * rows[distance].to_numpy()
        factor = rows["weight_change"].to_numpy() / promised
    trivial = np.full(len(rows), False)
    if distance == "score_change":  # where both rows have the same set, ½ holds for any two
        trivial = (log_bound >= _LOG_HALF - 1e-12) & fixed & ~violated & ~not_met
    counts = {
        "holds": int((~violated & ~trivial & ~not_met).sum()),
        "violated": int(violated.sum()),
        "vacuous": int(trivial.sum()),
        "not_met": int(not_met.sum()),
    }
    numbers = {
        **counts,
        "largest measured over bound": float(np.nanmax(factor[~not_met], initial=0.0)),
        "promises no less than 2": int((~not_met & (promised >= 2)).sum()),
    }
    if form == "paper":
        numbers["below the sound form"] = int((rows["ln_paper"] < rows["ln_sound"] - 1e-12).sum())
    claim = SECANT_CLAIM if distance == "score_change" else ROWS
    note = ""
    if unmet := counts["not_met"]:
        ties = counted(int((rows["separation"] == 0).sum()), "tie")
        note = f"no ξ_h for {counted(unmet, 'row')}: Δ ≤ 0 ({ties} within rounding), or not finite"
    return Finding(model, claim, form, "all", of_rows(**counts), numbers, note)


def exceeding(rows: pd.DataFrame, bound: str, distance: str = "score_change") -> NDArray[np.bool_]:
    """Return which measured pairs of rows exceed a form of ξ by more than float64 rounding."""
    with np.errstate(over="ignore", invalid="ignore"):
        promised = np.exp(rows[bound].to_numpy()) * rows[distance].to_numpy()
        above: NDArray[np.bool_] = rows["weight_change"].to_numpy() > promised * (1 + _SLACK) + 1e-13
    return ~_not_met(rows, bound) & above


def _not_met(rows: pd.DataFrame, bound: str) -> NDArray[np.bool_]:
    fixed = _fixed(rows, bound)
    separated = rows["separation"].to_numpy() > 0
    unknown: NDArray[np.bool_] = ~(rows[bound].to_numpy() < math.inf) | (~fixed & ~separated)
    return unknown


def _fixed(rows: pd.DataFrame, bound: str) -> NDArray[np.bool_]:
    """Return for which pairs a form takes the set as fixed: that of a pair does wherever the sets are equal."""
    fixed: NDArray[np.bool_] = rows["fixed_set"].to_numpy(bool)
    return fixed | rows["same_set"].to_numpy(bool) if bound in ("ln_pair", "ln_row") else fixed


def _local(model: str, queries: pd.DataFrame, tolerance: float) -> Finding:
    queries = queries[queries["kept"] > 0]  # without a key there is no softmax
    usable = queries[np.isfinite(queries["dispersion"])]
    delta, key_count = (torch.tensor(usable[name].to_numpy(np.float64)) for name in ("dispersion", "kept"))
    bound = fixed_mask_stability(delta, key_count).log_value.exp().numpy()
    local = query_stability(usable).to_numpy()
    violated = local > bound * (1 + tolerance) + tolerance * 1e-3
    trivial = ~violated & (bound >= 0.5)
    counts = {
        "holds": int((~violated & ~trivial).sum()),
        "violated": int(violated.sum()),
        "vacuous": int(trivial.sum()),
        "not_met": len(queries) - len(usable),
    }
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = local / bound
    numbers = {**counts, "largest measured over bound": float(np.nanmax(factor, initial=0.0))}
    return Finding(model, LOCAL, "sound", "all", of_rows(**counts), numbers)


def stability_table(findings: Findings) -> pd.DataFrame:
    """Return percentiles of measured changes and of both forms of ξ, per layer and head, and pooled."""
    rows: list[dict[Any, Any]] = []
    for facts in findings.measurements.models[["model", "attention"]].to_dict("records"):
        measured = findings.measurements.of(facts["model"])
        model = {"model": facts["model"]}
        local = measured.queries.assign(local=query_stability(measured.queries))
        rows += [{**model, "noise": None, **row} for row in _by_place(local, {"local": "local"})]
        named = {"secant": "secant", "response": "weight_change"}
        named |= {name: name for name in ("ln_pair", "ln_sound", "ln_paper", "ln_row")}
        for noise, secants in with_bounds(measured[SECANTS], str(facts["attention"])).groupby("level"):
            rows += [{**model, "noise": noise, **row} for row in _by_place(secants, named)]
    return pd.DataFrame(rows)


def _by_place(rows: pd.DataFrame, columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    places: list[tuple[Any, Any, pd.DataFrame]] = [
        (layer, head, part) for (layer, head), part in rows.groupby(["layer", "head"], sort=True)
    ]
    for layer, head, part in [*places, (ALL, ALL, rows)]:
        for quantity, column in columns.items():
            yield {"layer": layer, "head": head, "quantity": quantity, **percentiles(part[column])}


def response_table(findings: Findings) -> pd.DataFrame:
    """Return whose attention weights move more under the same noise."""
    secants = findings.measurements[SECANTS]
    rows = dict(iter(secants.groupby(["model", "level"], sort=False)))
    results = []
    for pair in findings(compared_pairs):
        for level in sorted(secants["level"].unique()):
            if (pair.full, level) not in rows or (pair.counterpart, level) not in rows:
                continue
            counterpart = rows[pair.counterpart, level]
            full = rows[pair.full, level]
            ratio = ratio_interval(counterpart, full, "weight_change", resamples=RESAMPLES)
            results.append(
                {
                    "pair": pair.label, "level": level, "mean": percentiles(counterpart["weight_change"])["mean"],
                    "full_mean": percentiles(full["weight_change"])["mean"], "ratio": ratio.estimate,
                    "low": ratio.low, "high": ratio.high,
                }
            )  # fmt: skip
    return pd.DataFrame(results, columns=["pair", "level", "mean", "full_mean", "ratio", "low", "high"])


def answer(findings: Findings) -> Answer:
    """Return the local constant, secants, response both forms of ξ, and whether they bound the changes."""
    judged = findings(stability_findings)
    results: dict[str, Summary] = {}
    shown: list[Shown] = []
    for row in findings.measurements.models.to_dict("records"):
        model = row["model"]
        described = _result(findings.measurements.of(model), str(row["attention"]))
        results[model] = json_ready(described | {"verdicts": verdicts_of(judged, model)})
        shown += _shown(title(findings, model), results[model])
        shown += [verdict_line(finding) for finding in judged if finding.subject == model]
    tables = {"stability": with_facts(findings, all_by_name(findings(stability_table)))}
    tables["stability_verdicts"] = verdict_table(judged)
    if len(gains := findings.measurements[GAINS]):
        medians = gains.groupby(["model", "layer", "head"], sort=False)[[*_GAINS, "xi"]].median()
        tables["gains"] = medians.reset_index()
    glance = stability_glance(findings)
    return Answer(
        glance,
        [glance.claim],
        [*stability_claims(findings), *gain_claims(findings)],
        judged,
        tables=tables,
        results=results,
        shown=shown,
        most_lines=MOST_LINES,
    )


def _result(measured: Measurements, attention: str) -> Summary:
    secants = with_bounds(measured[SECANTS], attention)
    layers = []
    for layer, head in sorted({*zip(measured.queries["layer"], measured.queries["head"], strict=True)}):
        parts = (t[(t["layer"] == layer) & (t["head"] == head)] for t in (measured.queries, secants))
        gains = measured[GAINS][(measured[GAINS]["layer"] == layer) & (measured[GAINS]["head"] == head)]
        layers.append({"layer": int(layer), "head": int(head), **_describe(*parts), **_medians(gains)})
    pooled = {**_describe(measured.queries, secants), **_medians(measured[GAINS])}
    return {"unit": "per nat", "layers": layers, "all": pooled}


def _medians(gains: pd.DataFrame) -> Summary:
    return {} if gains.empty else {name: float(gains[name].median()) for name in _GAINS}


def _describe(queries: pd.DataFrame, secants: pd.DataFrame) -> Summary:
    described: Summary = {"local": without(percentiles(query_stability(queries)), "not_positive")}
    if secants.empty:
        return described
    levels = {float(str(level)): rows for level, rows in secants.groupby("level")}
    response = [{"noise": level, **_percentiles(rows, "weight_change")} for level, rows in levels.items()]
    described |= {"response": response, **_moved(secants)}
    if len(levels) > 1:  # what stands above is then of all levels together
        described["by_noise"] = [{"noise": level, **_moved(rows)} for level, rows in levels.items()]
    return described


def _moved(secants: pd.DataFrame) -> Summary:
    described = {name: _percentiles(secants, name) for name in ("secant", "ln_pair", "ln_sound", "ln_paper")}
    return {**described, "same_set": float(secants["same_set"].mean())}


def _percentiles(rows: pd.DataFrame, name: str) -> Summary:
    return without(percentiles(rows[name]), "not_positive")


def stability_glance(findings: Findings) -> Glance:
    """Return how many measured pairs of rows exceed the paper's bound."""
    exceeded = findings(exceeding_pairs)
    if "paper" not in exceeded:
        words = "were measured in attention whose ξ is known"
        return Glance(Outcome.OPEN, "0 pairs of rows", words, of_paper=True, claim_id="exceeding")
    paper = exceeded["paper"]
    sound = exceeded[OF_PAIR]
    # Even if no pair exceeds it, the paper's form is not a bound for every row (docs/theory.md).
    outcome = Outcome.OPEN if 2 * paper["vacuous"] > paper["rows"] else Outcome.MEASURED
    if paper["violated"]:
        outcome = Outcome.DOES_NOT
    words = (
        f"measured pairs of rows exceed the paper's bound ξ{paper['fixed']} (for {paper['vacuous']:,} it is "
        f"too loose to test), {sound['violated']:,} exceed the sound one of the pair (too loose for "
        f"{sound['vacuous']:,})"
    )
    number = f"{paper['violated']:,} of {paper['rows']:,}"
    return Glance(outcome, number, words, of_paper=True, claim_id="exceeding")


def exceeding_pairs(findings: Findings) -> dict[str, dict[str, Any]]:
    """Return counts of pairs of rows by form of ξ, and words if all that exceed it are of fixed masks."""
    models = findings.measurements.models
    fixed = set(models[models["attention"].isin(FIXED_MASKS) & ~models["attention"].isin(DENSE)]["model"])
    exceeding = {}
    for form in (OF_PAIR, "sound", "paper"):
        judged = [f for f in findings(stability_findings) if f.claim == SECANT_CLAIM and f.form == form]
        if judged:
            counts = {n: int(sum(f.numbers[n] for f in judged)) for n in ("violated", "vacuous", "holds")}
            of_fixed = int(sum(f.numbers["violated"] for f in judged if f.subject in fixed))
            words = ", all of fixed masks" if 0 < counts["violated"] == of_fixed else ""
            exceeding[form] = {**counts, "rows": sum(counts.values()), "fixed": words}
    return exceeding


def stability_claims(findings: Findings) -> list[Claim]:
    """Return whether ξ bounds the measured changes, form by form, and whose attention moves more."""
    claims = []
    for model, label in model_labels(findings.measurements.models).items():
        lines = [f"{verdict_line(f)}." for f in findings(stability_findings) if f.subject == model]
        if lines:
            claims.append(Claim("bounds", f"{label}: {' '.join(lines)}", model))
    samples = findings.measurements[SECANTS].groupby("model")["sample"].nunique().min()
    for row in findings(response_table).to_dict("records"):
        sentence = _response(row, int(samples))
        ends = (row["low"], row["high"])
        claims.append(Claim(f"response-{row['level']:g}", sentence, row["pair"], row["ratio"], "ratio", ends))
    nothing = "Nothing was perturbed: nothing is known of the stability of these models' attention."
    return claims or [Claim("bounds", nothing)]


def _response(row: Mapping[Any, Any], samples: int) -> str:
    start = f"{row['pair']}: {percent(row['level'], 'g')} input noise"
    if row["mean"] == row["full_mean"] == 0:
        return f"{start} moves neither this model's attention nor its counterpart's (mean ‖p − p′‖₁ 0 for both)."
    mean, full_mean = (number(row[name], 2, unknown="undefined") for name in ("mean", "full_mean"))
    means = f"mean ‖p − p′‖₁ {mean} against {full_mean}"
    if math.isfinite(row["ratio"]):
        interval = interval_words(row["low"], row["high"], partial(number, digits=2), samples)
        means += f"; ratio of the medians {row['ratio']:.2g}, {interval}"
    if min(row["low"], row["ratio"]) > 1:
        return f"{start} moves this model's attention more than its counterpart's ({means})."
    if max(row["high"], row["ratio"]) < 1:
        return f"{start} moves this model's attention less than its counterpart's ({means})."
    return f"{start}: inconclusive whether this model's attention moves more than its counterpart's ({means})."


def gain_claims(findings: Findings) -> list[Claim]:
    """Return which layer amplifies most, and whether ξ foretells it."""
    claims = []
    for model, label in model_labels(findings.measurements.models).items():
        gains = findings.measurements.of(model)[GAINS]
        if gains.empty:
            continue
        by_layer = gains.groupby("layer")["gain"].median()
        words = (
            f"{label}: a small change of queries, keys and values can change a head's output by "
            f"{by_layer.max():.3g} times as much in layer {by_layer.idxmax()}, where the median over heads is "
            f"largest, and {by_layer.min():.3g} in layer {by_layer.idxmin()} "
            f"({counted(gains['sample'].nunique(), 'sample')})."
        )
        heads = gains.groupby(["layer", "head"], as_index=False)[["gain", "xi"]].median()
        if len(heads) >= _FEWEST_HEADS:
            foretold = head_correlation(heads)
            interval = interval_words(foretold.low, foretold.high)
            words += (
                f" Over its {len(heads)} heads the rank correlation of this gain with ξ is "
                f"{foretold.estimate:.2f}, {interval} (heads resampled)."
            )
        claims.append(Claim("gain", words, model, float(by_layer.max()), "ratio"))
    return claims


def head_correlation(heads: pd.DataFrame) -> Interval:
    """Return Spearman's correlation of ξ and gain over heads, a row each, with an interval over such heads."""
    return rank_correlation_interval(heads.assign(sample=np.arange(len(heads))), "xi", "gain", RESAMPLES)


_GAINS = ("gain", "score_gain", "value_gain")
_FEWEST_HEADS = 10  # for a rank correlation

_COLUMNS = (
    Column("layer", form=plain), Column("head", form=plain),
    Column("local.p50"), Column("local.p100", drop=4), Column("secant.p50"), Column("secant.p100"),
    Column("ln_pair.p50", "ln ξ pair p50"), Column("ln_pair.p100", "ln ξ pair p100", drop=3),
    Column("ln_sound.p50", "ln ξ p50"), Column("ln_sound.p100", "ln ξ p100", drop=2),
    Column("ln_paper.p50", "ln ξ paper p50"), Column("ln_paper.p100", "ln ξ paper p100", drop=1),
    Column("same_set", form=percent), Column("gain", drop=2),
)  # fmt: skip
_WITHOUT_NOISE: Summary = dict.fromkeys(("secant", "ln_pair", "ln_sound", "ln_paper", "same_set", "gain"))


def _shown(name: str, result: Summary) -> Iterator[str | NumberTable]:
    rows = [*result["layers"], {"layer": "all", "head": "", **result["all"]}]
    levels = [level["noise"] for level in result["all"].get("response", [])]
    for place, level in enumerate(levels or [None]):
        at = f" at noise {level:g}" if len(levels) > 1 else ""
        table_rows = [{**row, **row["by_noise"][place]} if at else row for row in rows]
        response = [Column(f"response.{place}.mean", f"response {level:g}")] if levels else []
        yield f"{name}: softmax stability{at}"
        yield NumberTable([*_COLUMNS, *response], [_WITHOUT_NOISE | row for row in table_rows])


POINTS = 300
_EXCEEDING = 50
_RANGE = (0.1, 100.0)
_TOP = 10.0
_FLOOR = 1e-5
_MOST = 3  # panels
_NAMED = 5  # layers of models with rows above the paper's form
_SHADE = "#f6dcc3"


@drawing(
    "Constant ξ of a softmax row against its dispersion δ for few, some and many keys, logarithmic axes, in the "
    "paper's form and the sound one, with measured secants of full attention and fixed masks: {shown}.",
    "Every point, a measured change of attention over the change of its scores, must lie below the solid curve, "
    "the smallest constant that holds for all rows of that δ. Where the paper's dashed curve lies below it "
    "(shaded) it is no upper bound; points above it are ringed.",
)
def stability_curves(findings: Findings) -> Figure:
    """Draw ξ = e^δ/n and ξ*(δ, n) against δ for the numbers of keys that rows have, and their secants."""
    rows = _rows(findings)
    if rows.empty:
        raise NothingToDrawError("No secant of full attention or of a fixed mask was measured.")
    panels = _lengths(rows)
    labels = short_labels(findings.measurements.models)
    figure, axes = panel_grid(len(panels), height=3.6)
    for ax, keys in zip(axes, panels, strict=True):
        _draw_curves(ax, keys)
        _draw_points(ax, keys, rows[rows["kept"] == keys])
    axes[0].set_ylabel("‖p − p′‖₁ / ‖z − z′‖₁ (per nat)")
    exceeding = rows[rows["above"]].groupby(["model", "layer"], sort=False).size().nlargest(_NAMED)
    above = [
        f"{labels[model]}, layer {layer} ({number})"
        for (model, layer), number in zip(exceeding.index.tolist(), exceeding, strict=True)
    ]
    levels = ", ".join(percent(level, "g") for level in sorted(rows["level"].unique()))
    samples = counted(int(rows.groupby("model")["sample"].nunique().max()), "sample")
    return finished(
        figure,
        f"input noise {levels} of each embedded token's RMS, {samples} per model, one draw each; at most {POINTS} "
        f"points per panel.\nUp to {_EXCEEDING} above the "
        "paper's form and the five closest to ξ* are always drawn. No row exceeds ½ (dotted): a constant above "
        "it says nothing. Rows of top-k masks are not shown: their ξ depends on Δ as well."
        + (f"\nAbove the paper's form, most first: {'; '.join(above)}." if above else ""),
    )


def _lengths(rows: pd.DataFrame) -> list[int]:
    """Return the numbers of keys at the rows' 10th, 50th and 90th percentile, and the one most often exceeded."""
    chosen = {int(keys) for keys in rows["kept"].quantile([0.1, 0.5, 0.9], interpolation="nearest")}
    above = rows.loc[rows["above"], "kept"].value_counts().index
    if len(above) and int(above[0]) not in chosen:
        if len(chosen) == _MOST:
            chosen.remove(min(chosen, key=lambda keys: abs(keys - int(above[0]))))
        chosen.add(int(above[0]))
    return sorted(chosen)


def _rows(findings: Findings) -> pd.DataFrame:
    """Return nonzero secants of full attention and fixed masks beside ξ, full attention first."""
    measurements = findings.measurements
    parts = []
    models = measurements.models[measurements.models["attention"].isin(FIXED_MASKS)]
    for model, attention in zip(models["model"], models["attention"], strict=True):
        secants = with_bounds(measurements[SECANTS][measurements[SECANTS]["model"] == model], attention)
        usable = (secants["secant"] > 0) & (secants["dispersion"] > 0) & np.isfinite(secants["ln_sound"])
        parts.append(secants.assign(attention=attention, above=exceeding(secants, "ln_paper"))[usable])
    rows: pd.DataFrame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return rows


def _draw_curves(ax: Axes, keys: int) -> None:
    delta = np.geomspace(*_RANGE, 181)
    sound = fixed_mask_stability(torch.tensor(delta), keys).log_value.numpy()
    paper = paper_fixed_mask_stability(torch.tensor(delta), keys).log_value.numpy()
    shown = np.exp(np.minimum(paper, math.log(10 * _TOP)))
    ax.fill_between(delta, shown, np.exp(sound), where=paper < sound, color=_SHADE, linewidth=0,
                    label="paper form below the sound one")  # fmt: skip
    ax.plot(delta, np.exp(sound), color=INK, linewidth=1.6, label="sound: ξ*(δ, n)")
    ax.plot(delta, shown, color=INK, linewidth=1.3, linestyle=(0, (5, 2)), label="paper: e^δ/n")
    ax.axhline(0.5, color=FAINT, linewidth=0.7, linestyle=(0, (1, 2)))
    ax.set(xscale="log", yscale="log", xlim=_RANGE, ylim=(_FLOOR, _TOP), xlabel="dispersion δ (nats)")
    plain_numbers(ax.xaxis)


def _draw_points(ax: Axes, keys: int, rows: pd.DataFrame) -> None:
    threshold = paper_form_threshold(torch.tensor([keys])).item()
    facts = [f"paper form below the sound one for δ < {threshold:.2f}"] if threshold else []
    facts.append(f"{len(rows):,} measured pairs of rows, {rows['above'].sum():,} above the paper's form")
    title_with_facts(ax, f"n = {counted(keys, 'key')}", facts)
    excess = np.log(rows["secant"]) - rows["ln_paper"]
    always = (np.log(rows["secant"]) - rows["ln_sound"]).nlargest(5).index
    always = always.union(excess[rows["above"]].nlargest(_EXCEEDING).index)
    remaining = rows.drop(index=always)
    chosen = remaining.sample(min(POINTS - len(always), len(remaining)), random_state=0).index.union(always)
    points = rows.loc[chosen]
    kinds = [kind for kind in ATTENTION_STYLES | DENSE_STYLES if kind in set(points["attention"])]
    for kind in kinds:
        style = attention_style(kind)
        of_kind = points[points["attention"] == kind]
        ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", markersize=4,
                label=f"{style.name}, measured")  # fmt: skip
        ax.plot(
            of_kind["dispersion"], of_kind["secant"].clip(lower=_FLOOR), marker=style.marker, markersize=2,
            markeredgewidth=0, color=lightened(style.color, 0.2), linestyle="none", zorder=3,
        )  # fmt: skip
        above = of_kind[of_kind["above"]]
        ax.plot(
            above["dispersion"], above["secant"], marker=style.marker, markersize=4.5, markeredgecolor=INK,
            markeredgewidth=0.9, color=style.color, linestyle="none", zorder=4,
        )  # fmt: skip
    if points["above"].any():
        ax.plot(
            [], [], marker="o", markersize=4.5, markerfacecolor="none", markeredgecolor=INK, linestyle="none",
            label="above the paper's form",
        )  # fmt: skip


HEADINGS = heading(
    "stability", "Is the stability bound respected?", (stability_curves,),
    "A constant bounds the worst pair of rows; the response is an average under one kind of noise. A small δ can "
    "lower the first and leave the second high.",
    "ξ bounds the attention weights by the change of the scores, not by noise at the input: earlier layers and Γ "
    "decide that.",
    "The heavy-hitter form takes the larger δ and the smaller Δ of both rows. Rows with Δ ≤ 0 are counted, not "
    "judged.",
)  # fmt: skip
