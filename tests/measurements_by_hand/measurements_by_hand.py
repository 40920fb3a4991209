"""Measurements built by hand, with numbers that the tests know."""

import json
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag.capturing.batches import split
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.calls.tile_weights import TILES
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import ratio_interval
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.subject import Subject
from semdiag.measuring.survey import survey
from semdiag.measuring.table import typed
from semdiag.questions.convergence import answer as speed_and_dispersion
from semdiag.questions.dispersion import answer as dispersion
from semdiag.questions.k_sweep import KSweepPlan
from semdiag.questions.k_sweep.rerun import RERUN_TABLE
from semdiag.questions.registry import plans as every_plan
from semdiag.questions.registry import tables as declared_tables
from semdiag.questions.retrieval.measure import RETRIEVAL
from semdiag.questions.stability import answer as stability
from semdiag.reporting.report import write_report

SAMPLES, LENGTH, LAYERS = 6, 8, 2
# Factor on the dispersions, keys kept, separation of each query.
KINDS = {"full": (4.0, LENGTH, np.inf), "topk": (1.0, 3, 0.01), "banded": (2.0, 3, -0.5), "block": (2.5, 3, -0.4)}


def one_model(attention="full", task="even-pairs", seed=7, snapshot="last", path=None, epochs=4, within=()):
    """Dispersion of query q in layer l: factor · (l + 1) · (q + 1) / LENGTH; accuracy 0.25, 0.5, … by epoch."""
    factor, kept, separation = KINDS.get(attention, (3.0, 3, 0.2))
    path = path or f"{task}-{attention}-{seed}/{snapshot}.pt"
    rows = pd.MultiIndex.from_product(
        [range(SAMPLES), range(LAYERS), [0], range(LENGTH)], names=["sample", "layer", "head", "query"]
    ).to_frame(index=False)
    queries = rows.assign(keys=LENGTH, kept=kept, separation=separation)
    queries["dispersion"] = factor * (queries["layer"] + 1) * (queries["query"] + 1) / LENGTH
    for k in within:
        queries[f"dispersion_k{k}"] = queries["dispersion"] * k / LENGTH
        queries[f"separation_k{k}"] = 0.02
        queries[f"weight_kept_k{k}"] = k / LENGTH
    loads = rows.rename(columns={"query": "key"}).assign(load=LENGTH)
    if attention != "full":
        loads["load"] = np.tile([6, 6, 6, 6, 0, 0, 0, 0], SAMPLES * LAYERS)
    for k in within:
        loads[f"load_k{k}"] = k
    epoch = np.arange(1, epochs + 1)
    accuracy = np.minimum(epoch / (4 if attention == "full" else 2), 1.0)
    history = {"epoch": epoch, "train_loss": 1 / epoch, "train_accuracy": accuracy}
    history |= {"holdout_loss": 2 / epoch, "holdout_accuracy": accuracy / 2}
    row = {
        "model": path, "sha256": "ab" * 32, "source": "semdiag", "snapshot": snapshot, "task": task,
        "attention": attention, "k": None if attention == "full" else kept, "seed": seed, "epoch": epochs,
        "blocks": LAYERS, "heads": 1, "width": 16, "length": LENGTH, "parameters": 1234, "samples": SAMPLES,
        "inputs": "made by hand", "accuracy": 0.75, "attention_found": LAYERS, "attention_captured": LAYERS,
        "residual": 1e-7,
    }  # fmt: skip
    types = {"k": "Int64", "seed": "Int64", "epoch": "Int64", "task": "str", "accuracy": "float64"}
    columns = ["model", "sample", "layer", "head", "scores"]
    return Measurements(
        models=typed(pd.DataFrame([row]), types),
        queries=queries.assign(model=path),
        loads=loads.assign(model=path),
        history=pd.DataFrame(history).assign(model=path),
        non_finite=typed(pd.DataFrame({name: [] for name in columns}), {"model": "str", "scores": "int64"}),
        provenance={"semdiag": "0.1.0", "device": "cpu"},
    )


def with_theory(measurements, noise=0.01):
    """Add secants, constants and slopes: secant 0.02 everywhere, bounds 10^6 (paper 10^8), slopes 10^-2, 10^-3."""
    parts = [
        _theory(row, measurements.of(row["model"]).queries, noise)
        for row in measurements.models.to_dict("records")
    ]
    tables = {
        name: pd.concat([part[name] for part in parts], ignore_index=True).astype(
            dict(declared_tables()[name].columns)
        )
        for name in ("secants", "constants", "parameters")
    }
    known = {"seed": 0, "dtype": "float64", "noise": [noise], "noise_samples": SAMPLES, "bound_samples": 5}
    return measurements.replace({**measurements.provenance, **known}, **tables)


def with_masks(measurements, levels=(0.01, 0.1), draws=5):
    """Add masks and what noise does: exact 1 − level · (layer + 1), of which half are certified; Δ = query + 1."""
    parts, effects = [], []
    for row in measurements.models.to_dict("records"):
        queries = measurements.queries[measurements.queries["model"] == row["model"]]
        for level in levels:
            exact = 1 - level * (queries["layer"] + 1)
            parts.append(
                queries[["model", "sample", "layer", "head", "query"]].assign(
                    level=level, kept=3, draws=draws, separation=queries["query"] + 1.0, exact=exact,
                    agreement=1 - (1 - exact) / (queries["query"] + 1), certified=exact / 2, certified_changed=0,
                    predicted=1 - level, swing_sd=0.5, response=level,
                )
            )  # fmt: skip
            effects.append(
                pd.DataFrame({"sample": range(SAMPLES)}).assign(
                    model=row["model"], level=level, logit_change=level, flipped=0.25, correct_before=1.0,
                    correct_after=0.75,
                )
            )  # fmt: skip
        if row["attention"] in ("banded", "block", "odd", "never heard of"):
            del parts[-len(levels) :]
    tables = {"masks": [declared_tables()["masks"].empty(), *parts], "noise_effects": effects}
    tables = {
        name: pd.concat(t, ignore_index=True).astype(dict(declared_tables()[name].columns))[
            list(declared_tables()[name].columns)
        ]
        for name, t in tables.items()
    }
    plan = {"levels": list(levels), "draws": draws, "absolute": False, "block": 0, "k": 3, "seed": 0}
    known = {"mask_noise": plan, "probe_samples": SAMPLES}
    return measurements.replace({**measurements.provenance, **known}, **tables)


def with_sweep(measurements):
    """Add a sweep up to k = 6: mass k/6, share k/12, δ(k) = k of δ = 6, Δ = 1/k, loads 2k, accuracy 0.1 k."""
    rows = []
    for row in measurements.models.to_dict("records"):
        if row["attention"] not in ("full", "topk"):
            continue
        for layer in (-1, 0):
            found = [(0, "dispersion", 6.0), (0, "ln_sound", -1.0), (0, "accuracy", 0.9)]
            for k in range(1, 7):
                found += [
                    (k, "weight_kept", k / 6),
                    (k, "dispersion", k),
                    (k, "ratio", k / 6),
                    (k, "separation", 1 / k),
                ]
                found += [(k, "load", 2 * k), (k, "ln_sound", 0.5), (k, "ln_paper", 1.0)]
                found += [(k, "accuracy", 0.1 * k), (k, "share", k / 12)]
            for k, quantity, value in found:
                place = {"model": row["model"], "layer": layer, "head": layer, "k": k, "quantity": quantity}
                counts = {"queries": 100, "undefined": 0, "not_positive": 0}
                rows.append(dict.fromkeys(declared_tables()["sweep"].columns, value) | place | counts)
    table = declared_tables()["sweep"].of_rows(rows)
    return measurements.replace({**measurements.provenance, "probe_samples": SAMPLES}, sweep=table)


def with_reruns(measurements):
    """The same, every model that was swept run with k = 1, 2, 4: k = 4 is harmless, the others cost 1 / k nats."""
    rows = [
        {
            "model": model, "mask": mask, "k": k, "sample": i, "part": 0, "chunk": 0, "targets": 5, "correct": 4,
            "predictions": 6, "changed": 1, "classes": 4,
            "loss": 5 * (0.3 + change + 1e-3 * np.sin(i) + (k > 0) * 1e-5 * (-1) ** i),
            "divergence": 6 * change, "output_change": 0.1, "kept": 100.0 * k, "keys": 800.0,
        }
        for model in measurements.sweep["model"].unique()
        for mask, k, change in (
            ("none", 0, 0.0), ("topk", 1, 1.0), ("topk", 2, 0.5), ("topk", 4, 0.0),
            ("window", 2, 1.5), ("random", 1, 2.0), ("random", 2, 2.0), ("random", 4, 1.0),
        )
        for i in range(12)
    ]  # fmt: skip
    return measurements.replace(rerun=RERUN_TABLE.of_rows(rows))


def _theory(row, queries, noise):
    ten = np.log(10)
    secants = queries[["model", "sample", "layer", "head", "query", "kept", "dispersion", "separation"]].assign(
        level=noise, weight_change=0.01 * (1 + queries["layer"]), score_change=0.5 * (1 + queries["layer"]),
        score_change_max=0.25 * (1 + queries["layer"]), same_set=True, log_odds=2.0,
        score_change_range=0.5 * (1 + queries["layer"]),
    )  # fmt: skip
    if row["attention"] == "topk":
        secants["weight_change"] *= 3
        secants["score_change"] *= 3
    measured = {"gamma": 0.0, "upsilon": 0.0, "token_norm": 1.0, "query_norm": 1.1}
    constants = [(layer, 0, name, "measured", ln, "") for layer in range(LAYERS) for name, ln in measured.items()]
    constants += [(layer, 0, "attention_map", "sound", 3.0, "") for layer in range(LAYERS)]
    constants += [(-1, -1, "network", "sound", 7 * ten, ""), (-1, -1, "network", "paper", 9 * ten, "not met: x")]
    columns = ["layer", "head", "quantity", "form", "ln_value", "assumptions"]
    tensors = [("embedding", -1, "embedding"), ("head", -1, "head")]
    tensors += [
        (f"{layer}.{g}", layer, g) for layer in range(LAYERS) for g in ("qk", "value-output", "mlp-in", "mlp-out")
    ]
    tensors = pd.DataFrame(tensors, columns=["tensor", "layer", "group"])
    return {
        "secants": secants[list(declared_tables()["secants"].columns)],
        "constants": pd.DataFrame(constants, columns=columns).assign(
            model=row["model"], holds=True, infinite=0, ln_finite=1.0
        )[list(declared_tables()["constants"].columns)],
        "parameters": tensors.assign(
            ln_point=np.where(tensors["group"] == "qk", -1.5 * ten, np.nan),
            model=row["model"],
            ln_sound=6 * ten,
            ln_paper=8 * ten,
            ln_local=3 * ten,
            ln_gradient=-2 * ten,
            ln_secant=-3 * ten,
            infinite=0,
            holds=True,
        )[list(declared_tables()["parameters"].columns)],
    }


def with_probes(measurements):
    """Add planes, secants, gradients and Jacobians: all below bounds of e^20, top-k half as steep."""
    parts = [_probes(row) for row in measurements.models.to_dict("records")]
    names = ("landscape", "loss_secants", "loss_gradients", "jacobians")
    tables = {
        name: pd.concat([part[name] for part in parts], ignore_index=True)
        .reindex(columns=list(declared_tables()[name].columns))
        .astype(dict(declared_tables()[name].columns))
        for name in names
    }
    known = {"seed": 0, "lipschitz_samples": SAMPLES}
    return measurements.replace({**measurements.provenance, **known}, **tables)


def _probes(row):
    model, steep = {"model": row["model"]}, 0.5 if row["attention"] == "topk" else 1.0
    cells = [(float(x), float(y), "grid") for y in (-1, 0, 1) for x in (-1, 0, 1)] + [(0.0, 0.0, "checkpoint")]
    landscape = pd.DataFrame(cells, columns=["x", "y", "place"])
    away = np.hypot(landscape["x"], landscape["y"])
    values = {"loss": 0.001 + steep * away, "accuracy": 1 - 0.4 * away, "distance": 10 * away}
    landscape = pd.concat(
        [landscape.assign(plane=plane, kind="random", samples=SAMPLES, **values) for plane in (0, 1)]
    )
    groups = ("all", "qk", "value-output", "mlp-in", "mlp-out", "embedding", "head")
    secants = [
        {"group": group, "draw": draw, "radius": radius, "distance": radius, "slope": steep * (1 + i) * radius}
        for group in groups for draw in range(5) for radius in (0.5, 1.0) for i in range(5)
    ]  # fmt: skip
    gradients = [
        {"group": g, "draw": d, "radius": d / 4, "distance": d, "slope": steep, "ln_sound": 20.0, "holds": True,
         "ln_point": 1.5 if (g, d) == ("qk", 0) else np.nan}
        for d in range(4) for g in groups
    ]  # fmt: skip
    norms = [
        {"layer": t, "sample": s, "norm": steep * (1 + s), "settled": True, "ln_sound": 5.0,
         "ln_point": 2.5, "ln_exact": 2.0}
        for t in range(LAYERS) for s in range(3)
    ]  # fmt: skip
    tables = {"loss_secants": secants, "loss_gradients": gradients, "jacobians": norms}
    return {"landscape": landscape.assign(**model)} | {
        name: pd.DataFrame(rows).assign(**model) for name, rows in tables.items()
    }


def with_runs(measurements):
    """Add a run per model."""
    rows = []
    for model in measurements.models.to_dict("records"):
        name, kind = model["model"], model["attention"]
        label = kind if kind == "full" else f"{kind}-3"
        setting = json.dumps({"task": model["task"]})
        rows.append((name, model["task"], label, kind, model["seed"], setting, 4, 4, "finished"))
    columns = declared_tables()["runs"].columns
    runs = declared_tables()["runs"].of_rows(dict(zip(columns, row, strict=True)) for row in rows)
    return measurements.replace({**measurements.provenance, "target": 0.95}, runs=runs)


def quick_interval(*rows, **options):
    """Three draws: how good intervals are is tested beside the resampling itself."""
    return ratio_interval(*rows, **{**options, "resamples": 3})


@contextmanager
def quick_intervals():
    with pytest.MonkeyPatch.context() as patch:
        for module in (dispersion, speed_and_dispersion, stability):
            patch.setattr(module, "ratio_interval", quick_interval)
        yield


@pytest.fixture(scope="module")
def few_resamples():
    with quick_intervals():
        yield


@pytest.fixture(scope="session")
def model():
    """Call with an attention, task, seed, snapshot, path, epochs, within: measurements of one model."""
    return one_model


@pytest.fixture(scope="session")
def make_four():
    """Call: one model of each attention, the full one with a counterfactual k = 3."""
    return lambda: Measurements.concat([one_model(kind, within=(3,) if kind == "full" else ()) for kind in KINDS])


@pytest.fixture
def four(make_four):
    """One model of each attention, the full one with a counterfactual k = 3."""
    return make_four()


@pytest.fixture(scope="session")
def theory():
    """Call with measurements: the same with the tables of the theory."""
    return with_theory


@pytest.fixture(scope="session")
def probed():
    """Call with measurements: the same with masks under noise and a sweep over k."""
    return lambda measurements, **masks: with_sweep(with_masks(measurements, **masks))


@pytest.fixture(scope="session")
def reruns():
    """Call with measurements that have a sweep: the same with reruns."""
    return with_reruns


@pytest.fixture(scope="session")
def probes():
    """Call with measurements: the same with the tables of landscape and lipschitz."""
    return with_probes


def with_retrieval(found):
    """Two texts of one task for every model: a window loses one of them; and what a choice of tiles keeps."""
    text = {
        "task": "passkey",
        "length": 64,
        "distance": 40,
        "depth": 0.4,
        "chance": 0.25,
        "k": 16,
        "tokens": 5,
        "text_tokens": 58,
    }
    rows = [
        {"model": model, **text, "sample": sample, "mask": mask, "hits": hits, "loss": 1.0, "text_loss": loss}
        for model in found.models["model"]
        for sample in range(2)
        for mask, hits, loss in (("none", 5, 100.0), ("window", 5 * sample, 101.0))
    ]
    kept = {"length": 64, "kind": "tile-4x4-mean", "k": 16, "module": "a", "layer": 0, "head": 0, "recall": 0.5}
    kept |= {"keys": 0.4, "weight": 0.6, "exact_weight": 0.7, "top_weight": 0.8, "chance": 0.3}
    tiles = TILES.of_rows({"model": model, **kept} for model in found.models["model"])
    return found.replace(retrieval=RETRIEVAL.of_rows(rows), tiles=tiles)


@pytest.fixture(scope="session")
def make_everything(make_four, tiny_runs):
    """Call: one model of each attention with every table that a section may need; a plane of two of them.

    Tables that nobody made by hand are measured on the tiny top-k run, and said of every model.
    """

    def make():
        found = with_theory(make_four())
        for with_tables in (with_probes, with_masks, with_sweep, with_reruns, with_runs, with_retrieval):
            found = with_tables(found)
        shown = found.landscape["model"].str.contains("full|topk") & (found.landscape["plane"] == 0)
        found = found.replace(landscape=found.landscape[shown])
        new = [plan for plan in every_plan() if not any(table.name in found for table in plan.tables())]
        measured = survey([tiny_runs.topk], Conditions(samples=4, plans=tuple(plan() for plan in new)))
        tables = {
            table.name: pd.concat(
                [measured[table].assign(model=model) for model in found.models["model"]], ignore_index=True
            )
            for plan in new
            for table in plan.tables()
        }
        return found.replace({**measured.provenance, **found.provenance}, **tables)

    return make


@pytest.fixture(scope="session")
def full_report(make_everything, tmp_path_factory):
    """Folder of a report with every section and figure. Do not write to it."""
    folder = tmp_path_factory.mktemp("deep") / "deeper" / "report"
    with quick_intervals():
        page, _ = write_report(Findings(make_everything()), folder, "semdiag report " + "x" * 300, ["svg"])
    return page.parent


@pytest.fixture(scope="session")
def many():
    """Two tasks, two seeds, last and initialisation, and a pair of models of unknown task. Do not change it."""
    parts = [
        one_model(kind, task, seed, snapshot, epochs=0 if snapshot == "initialisation" else 4)
        for task in ("even-pairs", "parity")
        for seed in (1, 2)
        for snapshot in ("last", "initialisation")
        for kind in ("full", "topk")
    ]
    parts += [
        one_model("full", None, None, path="unknown/full.pt"),
        one_model("odd", None, None, path="unknown/x.pt"),
    ]
    return Measurements.concat(parts)


def k_sweep_tables(model, tokens, labels=None, plan=None, *, min_keys=1, said=None, **how):
    """All tables of a k-sweep of one model, without a survey; remarks are added to ``said``."""
    loaded = model if isinstance(model, LoadedModel) else unnamed(model)
    chosen = {"batch_size": 100, "device": torch.device("cpu"), "dtype": torch.float32, "seed": 0, **how}
    batches = split(tokens, chosen["batch_size"])
    notes = [] if said is None else said
    subject = Subject(loaded, batches, labels, **chosen, notes=notes, min_keys=min_keys)
    return (plan or KSweepPlan()).measure(subject)
