"""The gate of ``semdiag check``: top-k attention must have the smaller dispersion."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from semdiag.measuring.findings.distributions import known_rows
from semdiag.measuring.findings.estimates import require_every_query
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import Pair, differences, find_pairs, rivals
from semdiag.measuring.percentiles import percentiles
from semdiag_models import InputError, TrainingConfig, configure, find_task, read_checkpoint

GATED = ("p50", "p75", "p90", "p95")
_USUAL_K = 5  # the paper's
NO_NUMBER = "because a δ there is not a number"
SHOWN = (*GATED, "p100")  # p100 is a single query: printed, not gated


@dataclass(frozen=True)
class GateResult:
    """The pooled dispersions of one pair."""

    pair: Pair  # full model and top-k model
    full: dict[str, float]  # δ_s of the full model by percentile (nats)
    topk: dict[str, float]  # δ_h of the top-k model by percentile (nats)
    failed: tuple[str, ...]  # gated percentiles at which δ_h < δ_s does not hold or is unknown

    @property
    def passed(self) -> bool:
        """Return whether δ_h < δ_s at every gated percentile."""
        return not self.failed

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the failed percentiles at which a δ is not a number."""
        return tuple(p for p in self.failed if math.isnan(self.full[p] + self.topk[p]))

    @property
    def fault(self) -> str:
        """Return in words why the pair fails; empty if it passes."""
        known = [p for p in self.failed if p not in self.unknown]
        parts = [f"δ_h < δ_s fails at {', '.join(known)}"] if known else []
        parts += [f"δ_h < δ_s cannot be judged at {', '.join(self.unknown)}, {NO_NUMBER}"] if self.unknown else []
        return "; ".join(parts)


def dispersion_gate(findings: Findings) -> list[GateResult]:
    """Compare pooled dispersions of paired full and top-k models."""
    require_every_query(findings, "The gate")
    models = findings.measurements.models
    pairs, alone = find_pairs(models)
    if alone:
        raise InputError(
            f"{alone[0]} has no partner: a full and a top-k checkpoint of the same task, seed, size, setting and "
            f"snapshot are needed{_nearest(models, alone[0])}. Train the other one with: "
            f"{partner_command(alone[0])}."
        )
    if not pairs:
        raise InputError(
            "There is no full or top-k checkpoint to pair. Train both with: semdiag train even-pairs, and: "
            "semdiag train even-pairs --attention topk --k 5."
        )
    results = []
    for pair in pairs:
        full, topk = (
            percentiles(known_rows(findings, model, "dispersion")["dispersion"])
            for model in (pair.full, pair.other)
        )
        failed = tuple(p for p in GATED if not topk[p] < full[p])
        results.append(GateResult(pair, {p: full[p] for p in SHOWN}, {p: topk[p] for p in SHOWN}, failed))
    return results


def require_one_partner(findings: Findings) -> None:
    """Refuse to judge if it is not clear which models are a pair."""
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
    differing = [(differences(models, Pair("", model, other)), other) for other in others]
    if not differing:
        return ""
    least, other = min(differing, key=lambda entry: len(entry[0]))
    return f" ({other} differs from it in {'; '.join(least)})"


def partner_command(model: str) -> str:
    """Return the command that trains the counterpart of a full or top-k model: ``semdiag train parity --seed 3``."""
    try:
        stored = read_checkpoint(Path(model))
        chosen = (
            {}
            if stored.model.attention == "topk"
            else {"attention": "topk", "k": min(_USUAL_K, stored.model.length)}
        )
        optimizer = {"optimizer": stored.training.optimizer}  # on which the usual learning rate depends
        usual = configure(find_task(stored.training.task_label), {**chosen, **optimizer})
    except InputError:
        return "semdiag train"
    words = ["semdiag", "train", stored.training.task]
    for name, value in chosen.items():
        words += [f"--{name}", str(value)]
    stored_values, recipe = ({**vars(a), **vars(b)} for a, b in ((stored.model, stored.training), usual))
    recipe["optimizer"] = TrainingConfig.optimizer
    if stored_values.pop("least_length") is not None:
        stored_values["length"] = f"{stored.training.least_length}:{stored.training.length}"
    for name, value in stored_values.items():
        if name in _NO_OPTIONS or value == recipe[name]:
            continue
        words.append("--compile" if name == "compiled" else f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return shlex.join(words)


# What differs in the counterpart, and what follows from the task.
_NO_OPTIONS = (
    *("attention", "k", "score_gradient", "vocabulary_size", "classes", "first_norm_eps", "selection_seed"),
    "task",
)
