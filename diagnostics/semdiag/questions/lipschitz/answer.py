"""Do the empirical Lipschitz estimates stay below the sound bounds, and has top-k the smaller ones?"""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from semdiag.measuring.findings.findings import (
    Finding,
    Findings,
    Pair,
    Summary,
    Verdict,
    compared_pairs,
    json_ready,
    log10,
    of_rows,
    records,
    verdicts_of,
)
from semdiag.measuring.findings.resampling import interval_ends
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.words import FEWEST, counted, interval, number, text
from semdiag.presenting.answer import (
    MOST_LINES,
    Answer,
    Claim,
    Shown,
    heading,
    measured_glance,
    title,
    verdict_line,
    with_facts,
)
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, model_labels, panels_of
from semdiag.presenting.drawing.style import drawing, finished, panel_grid
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.lipschitz.measure import JACOBIANS, LOSS_GRADIENTS, LOSS_SECANTS

PERCENTILES = (50, 75, 95, 99)  # of the paper's Fig. 10
RESAMPLES = 500
Array = NDArray[np.float64]


def secant_percentiles(findings: Findings) -> pd.DataFrame:
    """Return percentiles of the secants in random planes of all tensors, by radius."""
    rows: list[dict[str, Any]] = []
    for model, radius, secants in _circles(findings.measurements):
        facts = {"model": model, "radius": radius, "distance": float(secants["distance"].median())}
        rows += _percentile_rows([_by_plane(secants)], {**facts, "pairs": len(secants)})
    return pd.DataFrame(rows, columns=["model", "radius", "distance", "pairs", *_PERCENTILE])


def secant_ratios(findings: Findings, pair: Pair) -> pd.DataFrame:
    """Return percentiles of a counterpart's secants over those of its full model, by radius."""
    planes = {(model, radius): _by_plane(secants) for model, radius, secants in _circles(findings.measurements)}
    rows: list[dict[str, Any]] = []
    for radius in sorted({radius for _, radius in planes}):
        sides = [planes[model, radius] for model in (pair.counterpart, pair.full) if (model, radius) in planes]
        if len(sides) == 2 and len(sides[0]) == len(sides[1]):
            rows += _percentile_rows(sides, {"radius": radius})
    return pd.DataFrame(rows, columns=["radius", *_PERCENTILE])


_PERCENTILE = ("planes", "percentile", "estimate", "low", "high")


def _percentile_rows(sides: list[Array], facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield percentiles of a model's slopes, or of one's over another's, with intervals from the same draws."""
    planes = len(sides[0])
    draws = np.random.default_rng(0).integers(planes, size=(RESAMPLES, planes))
    once = [np.percentile(side, PERCENTILES) for side in sides]
    resampled = [np.percentile(side[draws].reshape(RESAMPLES, -1), PERCENTILES, axis=1) for side in sides]
    with np.errstate(divide="ignore", invalid="ignore"):
        estimates, spread = (reduce(np.divide, values) for values in (once, resampled))
    for percentile, estimate, several in zip(PERCENTILES, estimates, spread, strict=True):
        low, high = interval_ends(several, planes)
        yield {**facts, **dict(zip(_PERCENTILE, (planes, percentile, float(estimate), low, high), strict=True))}


def _circles(measurements: Measurements) -> Iterator[tuple[str, float, pd.DataFrame]]:
    table = measurements[LOSS_SECANTS]
    table = table[(table["group"] == "all") & np.isfinite(table["slope"])]
    for (model, radius), secants in table.groupby(["model", "radius"], sort=False):
        yield str(model), float(str(radius)), secants


def _by_plane(secants: pd.DataFrame) -> Array:
    """Return the slopes, (planes, pairs); all planes are cut to the fewest pairs, since rounding loses some."""
    slopes = [rows["slope"].to_numpy(np.float64) for _, rows in secants.groupby("draw", sort=True)]
    least = min(len(values) for values in slopes)
    return np.stack([values[:least] for values in slopes])


SCOPE = (
    "Every estimate is a lower one. Bounds hold for these samples at the drawn parameters, including the "
    "checkpoint."
)
GRADIENTS = "gradients of the loss are below the constants at the same parameters"
SECANT_CLAIM = "secants of the loss are below the largest constant of the drawn parameters"
JACOBIAN_CLAIM = "block Jacobians are below λ_X of the same sample"
AT_POINT = "gradients of queries and keys, and block Jacobians, are below the bounds at the same point"
ORDERING = "the loss is less steep around this model than around the full one"
_IDS = {
    GRADIENTS: "gradients",
    SECANT_CLAIM: "secants",
    JACOBIAN_CLAIM: "jacobians",
    AT_POINT: "at-the-point",
    ORDERING: "less-steep",
}
_SLACK = 1e-9


def estimate_findings(findings: Findings) -> list[Finding]:
    """Compare every empirical estimate with the sound bound."""
    results = []
    for model in findings.measurements[LOSS_GRADIENTS]["model"].unique():
        measured = findings.measurements.of(model)
        gradients = measured[LOSS_GRADIENTS]
        scored = gradients[gradients["ln_point"].notna()]
        slopes = pd.concat([scored["slope"], measured[JACOBIANS]["norm"]])
        blocks = measured[JACOBIANS]["ln_exact"].fillna(measured[JACOBIANS]["ln_point"])
        log_bounds = pd.concat([scored["ln_point"], blocks])
        results.append(_judged(model, AT_POINT, slopes, log_bounds, log_bounds < math.inf))
        bounds = gradients.groupby("group")["ln_sound"].max()
        assumptions_hold = gradients.groupby("group")["holds"].all()
        results.append(_judged(model, GRADIENTS, gradients["slope"], gradients["ln_sound"], gradients["holds"]))
        slopes = measured[LOSS_SECANTS]["slope"]
        groups = measured[LOSS_SECANTS]["group"]
        results.append(_judged(model, SECANT_CLAIM, slopes, groups.map(bounds), groups.map(assumptions_hold)))
        norms = measured[JACOBIANS]
        finite = norms["ln_sound"] < math.inf
        results.append(_judged(model, JACOBIAN_CLAIM, norms["norm"], norms["ln_sound"], finite))
    return results


def _judged(model: str, claim: str, measured: pd.Series, log_bound: pd.Series, holds: pd.Series) -> Finding:
    values = measured.to_numpy(float)
    bounds = log_bound.to_numpy(float)
    usable = holds.to_numpy(bool) & np.isfinite(values) & ~np.isnan(bounds) & (bounds < math.inf)
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(values, 0))
    violated = usable & (logs > bounds + _SLACK)
    counts = {
        "holds": int((usable & ~violated).sum()),
        "violated": int(violated.sum()),
        "not_met": int((~usable).sum()),
    }
    numbers: dict[str, float] = dict(counts)
    distinct = usable & np.isfinite(bounds) & np.isfinite(logs)  # where neither is 0
    gaps = bounds[distinct] - logs[distinct]
    if usable.any():
        numbers["largest measured"] = float(values[usable].max())
    if gaps.size:
        numbers |= {"smallest log10 gap": log10(float(gaps.min())), "largest log10 gap": log10(float(gaps.max()))}
    note = f"{counts['not_met']} have no bound or are not finite" if counts["not_met"] else ""
    return Finding(model, claim, "sound", "all", of_rows(**counts, vacuous=0), numbers, note)


def ordering_findings(findings: Findings, pair: Pair) -> list[Finding]:
    """Judge whether the loss is less steep around a counterpart than around its full model (paper, Fig. 10)."""
    judged = []
    ratios = findings(secant_ratios, pair)
    for percentile in PERCENTILES:
        rows = ratios[ratios["percentile"] == percentile]
        if rows.empty:
            continue
        lower = int((rows["high"] < 1).sum())
        higher = int((rows["low"] > 1).sum())
        verdict = Verdict.NOTHING
        if lower == len(rows):
            verdict = Verdict.HOLDS
        elif higher == len(rows):
            verdict = Verdict.VIOLATED
        numbers = {"radii": len(rows), "lower": lower, "higher": higher, "planes": int(rows["planes"].min())}
        numbers |= {"smallest ratio": rows["estimate"].min(), "largest ratio": rows["estimate"].max()}
        too_few_planes = numbers["planes"] < FEWEST
        note = f"random planes: {numbers['planes']}, too few for an interval" if too_few_planes else ""
        judged.append(Finding(pair.label, ORDERING, "", f"p{percentile}", verdict, numbers, note, percentile))
    return judged


def answer(findings: Findings) -> Answer:
    """Return secants by radius, gradients and Jacobians beside their bounds, and the steeper loss."""
    judged = findings(estimate_findings)
    results = {}
    shown: list[Shown] = []
    for model in findings.measurements.models["model"]:
        results[model] = json_ready(_result(findings, model) | {"verdicts": verdicts_of(judged, model)})
        name = f"{title(findings, model)}: Lipschitz estimates of the loss"
        shown += [name, NumberTable(_COLUMNS, results[model]["groups"])]
    pairs: list[Summary] = []
    for pair in findings(compared_pairs):
        ratios = records(findings(secant_ratios, pair))
        verdicts = verdicts_of(findings(ordering_findings, pair), pair.label)
        names = {"label": pair.label, "reference": pair.full, "other": pair.counterpart}
        pairs.append(names | {"ratios": ratios, "verdicts": verdicts})
        shown += [f"\n{pair.label}: secants of {pair.counterpart} over those of {pair.full}", _ratio_cells(ratios)]
    claims = lipschitz_claims(findings)
    return Answer(
        measured_glance(findings, findings.measurements[LOSS_GRADIENTS]),
        details=claims,
        findings=[*judged, *(f for pair in findings(compared_pairs) for f in findings(ordering_findings, pair))],
        tables=_tables(findings),
        results=results,
        more={"scope": SCOPE, "pairs": pairs},
        shown=[*shown, SCOPE],
        most_lines=MOST_LINES,
        opening=claims,
    )


def _result(findings: Findings, model: str) -> Summary:
    measured = findings.measurements.of(model)
    curves = findings(secant_percentiles)
    secants = measured[LOSS_SECANTS]
    groups = [
        {
            "group": group,
            "gradient": percentiles(rows["slope"]),
            "at_checkpoint": float(rows.loc[rows["draw"] == 0, "slope"].iloc[0]),
            "largest_secant": secants.loc[secants["group"] == group, "slope"].max(),
            "ln_sound": rows["ln_sound"].max(),
            "ln_point": rows["ln_point"].max(),
        }
        for group, rows in measured[LOSS_GRADIENTS].groupby("group", sort=False)
    ]
    blocks = [
        {"layer": layer, "stretch": percentiles(rows["norm"])}
        | {name: rows[name].max() for name in ("ln_sound", "ln_point", "ln_exact")}
        for layer, rows in measured[JACOBIANS].groupby("layer", sort=True)
    ]
    by_radius = records(curves[curves["model"] == model].drop(columns="model"))
    return {"unit": "nats per unit of the parameters", "groups": groups, "secants": by_radius, "blocks": blocks}


def _tables(findings: Findings) -> dict[str, pd.DataFrame]:
    tables = {"lipschitz_secants": with_facts(findings, findings(secant_percentiles))}
    for table in (LOSS_GRADIENTS, JACOBIANS):
        tables[table.name] = with_facts(findings, findings.measurements[table])
    ratios = [findings(secant_ratios, pair).assign(pair=pair.label) for pair in findings(compared_pairs)]
    return tables | ({"lipschitz_ratios": pd.concat(ratios, ignore_index=True)} if ratios else {})


def lipschitz_claims(findings: Findings) -> list[Claim]:
    """Say in how many cases a sparse model's loss is less steep, how many estimates exceed bounds, and each."""
    ordered = [f for pair in findings(compared_pairs) for f in findings(ordering_findings, pair)]
    bounded = findings(estimate_findings)
    if not [*ordered, *bounded]:
        return [Claim("steepness", "Nothing is known of the steepness of these models' loss.")]
    exceeding = sum(int(finding.numbers["violated"]) for finding in bounded)
    below = sum(int(finding.numbers["holds"]) for finding in bounded)
    words = f"{exceeding:,} of {counted(exceeding + below, 'estimate')} exceed their bound"
    if ordered:
        flatter = sum(finding.verdict is Verdict.HOLDS for finding in ordered)
        steeper = sum(finding.verdict is Verdict.VIOLATED for finding in ordered)
        cases = f"{flatter} of {counted(len(ordered), 'case')} (percentiles of secants), steeper in {steeper}"
        cases += f", inconclusive in {len(ordered) - flatter - steeper}"
        words = f"The loss is less steep around the sparse model in {cases}; {words}"
    labels = model_labels(findings.measurements.models)
    claims = [Claim("steepness", f"{words}.", value=exceeding, unit="estimates")]
    for finding in (*ordered, *bounded):
        sentence = f"{labels.get(finding.subject, finding.subject)}: {verdict_line(finding)}."
        id = _IDS[finding.claim] + ("" if finding.where == "all" else f"-{finding.where}")
        claims.append(Claim(id, sentence, finding.subject, verdict=finding.verdict))
    return claims


def _ratio(estimate: float, low: float | None, high: float | None) -> str:
    return f"{number(estimate)} ({interval(low, high, unknown='no interval')})"


_COLUMNS = (
    Column("group", "tensors", text), Column("at_checkpoint", "gradient here"),
    Column("gradient.p50", "gradient p50", drop=2), Column("gradient.p100", "largest gradient"),
    Column("largest_secant", drop=NEVER),
    Column("ln_sound", "ln bound", drop=NEVER),
)  # fmt: skip


def _ratio_cells(ratios: list[Summary]) -> NumberTable:
    rows: dict[float, Summary] = {}
    for one in sorted(ratios, key=lambda one: one["radius"]):
        rows.setdefault(one["radius"], {"radius": number(one["radius"])})[f"p{one['percentile']}"] = one
    percentiles = sorted({one["percentile"] for one in ratios})
    columns = [Column(f"p{p}.estimate p{p}.low p{p}.high", f"p{p}", _ratio) for p in percentiles]
    return NumberTable([Column("radius", "radius (‖θ‖)", text), *columns], rows.values())


@drawing(
    "Percentiles 50, 75, 95 and 99 of the secants of the loss between parameters on circles in random planes "
    "against the radius, logarithmic axes, with 95% bands, attention kinds together: {shown}.",
    "The lower curve belongs to the model whose loss changes less per distance, as the paper says of "
    "top-k. Where the bands overlap, the planes are inconclusive.",
)
def lipschitz_percentiles(findings: Findings) -> Figure:
    """Draw percentiles 50, 75, 95 and 99 of |f(θ) − f(θ')| / ‖θ − θ'‖ against the radius, with bands."""
    table = findings(secant_percentiles)
    table = table[table["estimate"] > 0]
    if table.empty:
        raise NothingToDrawError("No secant of the loss was measured in a plane.")
    measured = set(table["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in measured for s in p.series)]
    figure, axes = panel_grid(len(panels) * len(PERCENTILES), height=2.6, columns=len(PERCENTILES), sharey=True)
    places = [(panel, percentile) for panel in panels for percentile in PERCENTILES]
    for place, (ax, (panel, percentile)) in enumerate(zip(axes, places, strict=True)):
        _draw_percentiles(ax, panel, table[table["percentile"] == percentile])
        first = place % len(PERCENTILES) == 0
        ax.set_title(f"{panel.title}: p{percentile}" if first else f"p{percentile}")
        ax.set_xlabel("radius, in ‖θ‖")
        if first:
            ax.set_ylabel("secant of the loss\n(nats per unit of θ)")
    planes = int(table["planes"].min())
    pairs = int(table["pairs"].min())
    samples, seed = (findings.measurements.provenance.get(name, 0) for name in ("lipschitz_samples", "seed"))
    some = f"bands: 95%, whole planes resampled {RESAMPLES} times"
    bands = some if table["low"].notna().any() else "no bands: too few"
    return finished(
        figure,
        f"{counted(planes, 'random plane')} (seed {seed}), each tensor's direction as long as the tensor; per "
        f"radius {pairs} pairs of the checkpoint and points on circles; loss over {counted(samples, 'sample')}. "
        f"{bands}",
    )


def _draw_percentiles(ax: Axes, panel: Panel, table: pd.DataFrame) -> None:
    for series in panel.series:
        rows = table[table["model"] == series.model].sort_values("radius")
        if rows.empty:
            continue
        style = series.style
        ax.fill_between(
            rows["radius"], rows["low"].clip(lower=rows["low"][rows["low"] > 0].min()), rows["high"],
            color=style.color, alpha=0.2, linewidth=0,
        )  # fmt: skip
        ax.plot(
            rows["radius"], rows["estimate"], color=style.color, linestyle=style.line, marker=style.marker,
            markersize=3.5, linewidth=style.width, label=series.label,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")


HEADINGS = heading(
    "lipschitz", "How steep is the loss around the checkpoint?", (lipschitz_percentiles,),
    "A trained model whose loss is near 0 is flat nearby whatever its attention: compare the initialisations as "
    "well (the runs' epoch-0.pt).",
    "Random directions are nearly orthogonal to the gradient, so secants lie far below gradient norms. With a "
    "top-k mask the loss jumps where a key is swapped: secants see it, gradients do not.",
    "The intervals are about other random planes around these models, not about other training runs.",
)  # fmt: skip
