"""The gate of ``semdiag check``: heavy hitters must have the smaller dispersion."""

import shlex
from dataclasses import dataclass

import pandas as pd

from semdiag.findings.estimates import require_every_query
from semdiag.findings.findings import Findings
from semdiag.findings.pairing import Pair, differences, find_pairs, rivals
from semdiag.measurement.percentiles import percentiles
from semdiag_models import InputError, configure, find_task

GATED = ("p50", "p75", "p90", "p95")
_USUAL_K = 5  # the paper's
SHOWN = (*GATED, "p100")  # p100 is one query among hundreds of thousands: printed, not gated


@dataclass(frozen=True)
class GateResult:
    """The pooled dispersions of one pair.

    Attributes:
        pair: full model and top-k model.
        full: δ_s of the full model by percentile (nats).
        topk: δ_h of the top-k model by percentile (nats).
        failed: gated percentiles at which δ_h < δ_s does not hold.
    """

    pair: Pair
    full: dict[str, float]
    topk: dict[str, float]
    failed: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether δ_h < δ_s at every gated percentile."""
        return not self.failed


def dispersion_gate(findings: Findings) -> list[GateResult]:
    """Compare pooled dispersions of paired full and top-k models.

    Source: paper, the comparison of δ_s and δ_h at matching percentiles. Deviation: the maximum is not gated.

    Args:
        findings: of full and top-k models.

    Returns:
        One result per pair.

    Raises:
        InputError: if a full or top-k model has no partner, or there is nothing to pair.
    """
    require_every_query(findings, "The gate")
    models = findings.measurements.models
    pairs, alone = find_pairs(models)
    if alone:
        raise InputError(
            f"{alone[0]} has no partner: a full and a top-k checkpoint of the same task, seed, size, setting and "
            f"snapshot are needed{_nearest(models, alone[0])}. Train the other one with: "
            f"{partner_command(findings, alone[0])}."
        )
    if not pairs:
        raise InputError(
            "There is no full or top-k checkpoint to pair. Train both with: semdiag train even-pairs, and: "
            "semdiag train even-pairs --attention topk --k 5."
        )
    dispersions = {name: rows["dispersion"] for name, rows in findings.measurements.queries.groupby("model")}
    results = []
    for pair in pairs:
        full, topk = percentiles(dispersions[pair.full]), percentiles(dispersions[pair.other])
        failed = tuple(p for p in GATED if not topk[p] < full[p])
        results.append(GateResult(pair, {p: full[p] for p in SHOWN}, {p: topk[p] for p in SHOWN}, failed))
    return results


def require_one_partner(findings: Findings) -> None:
    """Refuse to judge where it is not clear which models are a pair.

    Args:
        findings: of full and top-k models.

    Raises:
        InputError: if several full models could be the partner of a top-k model.
    """
    models = findings.measurements.models
    for pair in find_pairs(models)[0]:
        if others := rivals(models, pair):
            raise InputError(
                f"{pair.full} and {others[0]} could both be the partner of {pair.other}, and differ: name one."
            )


def _nearest(models: pd.DataFrame, model: str) -> str:
    """In what the model differs from the one that comes nearest to being its partner; nothing if none does."""
    own = models[models["model"] == model].iloc[0]
    wanted = "topk" if own["attention"] == "full" else "full"
    others = models[(models["attention"] == wanted) & (models["task"] == own["task"])]["model"]
    found = [(differences(models, Pair("", model, other)), other) for other in others]
    if not found:
        return ""
    least, other = min(found, key=lambda entry: len(entry[0]))
    return f" ({other} differs from it in {'; '.join(least)})"


def partner_command(findings: Findings, model: str) -> str:
    """The command that trains the counterpart of a full or top-k model, as ``semdiag train parity --seed 3``.

    Args:
        findings: of the model.
        model: its path.

    Returns:
        The command, with every option in which the model differs from its task's recipe.
    """
    models = findings.measurements.models
    row = models[models["model"] == model].iloc[0]
    chosen = {} if row["attention"] == "topk" else {"attention": "topk", "k": _USUAL_K}
    try:
        usual, training = configure(find_task(str(row["task"])), chosen)
    except InputError:  # a text, or trees of another law: their own files and options are needed
        return "semdiag train"
    words = ["semdiag", "train", str(row["task"])]
    for name, value in chosen.items():
        words += [f"--{name}", str(value)]
    for name in ("blocks", "heads", "width", "length", "norm", "pooling"):
        if row[name] != getattr(usual, name):
            words += [f"--{name}", str(row[name])]
    words += [] if row["seed"] == training.seed else ["--seed", str(row["seed"])]
    return shlex.join(words)
