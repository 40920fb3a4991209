"""The registered analysis of the study of frozen queries and keys, on planted loss areas and written records."""

import json
import math
from pathlib import Path

import frozen as study
import frozen_figure
import frozen_spread
import numpy as np
import pandas as pd
import pytest

from semdiag.commands.sweep_results import SCHEMA
from semdiag_files import InputError
from semdiag_models.train import HISTORY_COLUMNS

pytestmark = pytest.mark.slow  # of a finished study

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
TABLES = ("advantages", "freezing", "straight_through", "expectations")
SHARES = {
    "topk-5": 0.8,
    "full-times-4": 0.3,
    "random-5": 1.0,
    "random-5-times-4": 0.0,
    "topk-5-straight-through": 0.8,
}


def planted(advantage=1.0, noise=0.0, tasks=None, freezing_full=0.05):
    """Loss areas of which trained attention has the advantage and frozen attention its share."""
    rng = np.random.default_rng(0)
    rows = []
    for task, attention, arm, seed in study.expected_runs().values():
        if tasks is None or task in tasks:
            kept = 1.0 if arm == "trained" else SHARES.get(attention, 0.0)
            area = -advantage * kept if attention != "full" else freezing_full * (arm == "frozen")
            wobble = 0.01 * (seed % 10) + noise * rng.standard_normal()
            rows.append((task, attention, arm, seed, area + wobble))
    return pd.DataFrame(rows, columns=[*study.RUN, "loss_area"])


def test_the_grid_is_the_registered_one():
    runs = study.expected_runs()
    assert len(runs) == len(set(runs.values())) == 420
    seeds = {names[3] for names in runs.values()}
    assert len(seeds) == 5
    seen = {
        json.loads(record)["training"]["seed"]
        for folder in ("pilot", "speed", "dose", "length-40")
        for record in pd.read_parquet(EXPERIMENTS / folder / "runs.parquet")["record"]
    }
    assert seen
    assert not seeds & seen
    for i in range(0, 420, 60):  # whole tasks, one after another, trained and then frozen
        part = list(runs.values())[i : i + 60]
        assert len({task for task, *_ in part}) == 1
        assert [arm for _, _, arm, _ in part] == ["trained"] * 30 + ["frozen"] * 30
    (tasks,) = {tuple(dict.fromkeys(task for task, *_ in runs.values()))}
    assert tasks[:3] == ("even-pairs", "missing-duplicate", "cycle-navigation")
    (sizes,) = {(run.model.blocks, run.model.width, run.training.train_samples, run.training.epochs,
                 run.training.fresh_samples) for run in runs}  # fmt: skip
    assert sizes == (2, 32, 2500, 120, True)


def test_known_shares_are_found():
    said, tables = study.analyse(planted(noise=1e-3))
    assert said == ["0 of 420 runs are missing."]
    for row in tables["advantages"].to_dict("records"):
        assert row["share_low"] - 0.02 < SHARES[row["attention"]] < row["share_high"] + 0.02
        assert row["trained"] == pytest.approx(1, abs=0.01)
        assert row["over_frozen_full"] == pytest.approx(row["frozen"] + 0.05, abs=0.01)
        expected = "most survives freezing" if SHARES[row["attention"]] > 0.5 else "most needs learning"
        assert row["reading"] == expected
    costs = tables["freezing"].set_index(["task", "attention"])["cost"]
    assert costs["parity", "full"] == pytest.approx(0.05, abs=0.01)
    assert costs["parity", "full-times-4"] == pytest.approx(0.7, abs=0.01)
    verdicts = tables["expectations"].set_index("expectation")["verdict"]
    assert verdicts["even-pairs: share of top-5 ≥ 0.7"] == "as expected"
    assert verdicts["missing-duplicate: share of top-5 ≤ 0.4"] == "contradicted"
    assert verdicts["cycle-navigation: frozen full attention at most 10% worse"] == "as expected"
    assert len(verdicts) == 10
    assert set(tables["straight_through"]["little"]) == {"as expected"}


def test_an_advantage_near_zero_has_no_share():
    _, tables = study.analyse(planted(advantage=0.01, noise=0.05))
    unclear = tables["advantages"][tables["advantages"]["trained_low"] <= 0]
    assert len(unclear) > 20
    assert unclear[["share", "share_low", "share_high"]].isna().all(axis=None)
    assert set(unclear["reading"]) <= {"no clear advantage: no share", "slower than full attention"}
    _, tables = study.analyse(planted(advantage=-1.0, noise=1e-3))
    assert set(tables["advantages"]["reading"]) == {"slower than full attention"}
    assert "as expected" not in set(tables["expectations"]["verdict"][:2])


def test_what_is_large_in_both_directions_cannot_tell():
    _, tables = study.analyse(planted(noise=0.6, freezing_full=0.2))
    assert study.TELLS_NOTHING in set(tables["expectations"]["verdict"])
    rows = planted(noise=1e-3)
    rows.loc[rows["attention"] == "topk-5-straight-through", "loss_area"] += 0.5
    _, tables = study.analyse(rows)
    assert set(tables["straight_through"]["little"]) == {"contradicted"}


def test_a_task_with_a_missing_run_has_no_conclusion():
    rows = planted()
    lacking = rows.drop(rows[(rows["task"] == "even-pairs") & (rows["seed"] == 39003)].index[:2])
    said, tables = study.analyse(lacking)
    assert said == ["2 of 420 runs are missing.", "even-pairs: 2 runs are missing: no conclusion."]
    for table in tables.values():
        assert not table.astype(str).apply(lambda column: column.str.contains("even-pairs")).any(axis=None)
    said, tables = study.analyse(planted(tasks=["even-pairs"]).iloc[:59])
    assert said[0] == "361 of 420 runs are missing."
    assert tables == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: pd.concat([rows, rows[:1]]), "occurs twice"),
        (lambda rows: rows.assign(seed=rows["seed"] + 1), r"39006\) is no run of"),
        (lambda rows: rows.assign(loss_area=math.nan), "not a finite number"),
    ],
)
def test_a_table_that_is_not_the_studys_is_refused(change, said):
    with pytest.raises(InputError, match=said):
        study.analyse(change(planted()))


def test_the_interval_holds_the_share_as_often_as_it_says():
    """2,000 planted studies of five seeds: 95% of them, by up to 3 standard errors of such a count, 1.5%."""
    rng, held, inside = np.random.default_rng(1), 0, 0
    for _ in range(2000):
        reference = 0.2 * rng.standard_normal(5)
        trained, frozen = (a + reference + 0.15 * rng.standard_normal(5) for a in (1.5, 0.6))
        found = study.share(frozen, trained)
        held += found.low <= 0.4 <= found.high
        inside += study.t_interval(trained).low > 0
    assert inside == 2000
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_the_interval_is_where_the_paired_t_test_is_not_significant():
    rng = np.random.default_rng(2)
    trained, frozen = 1.0 + 0.3 * rng.standard_normal(5), 0.5 + 0.3 * rng.standard_normal(5)
    found = study.share(frozen, trained)
    for end in (found.low, found.high):
        rest = study.t_interval(frozen - end * trained)
        assert min(abs(rest.low), abs(rest.high)) < 1e-12
    assert found.low < found.estimate < found.high


def write(folder, run, losses):
    history = {name: [1.0] * len(losses) for name in HISTORY_COLUMNS} | {"train_loss": losses}
    content = {
        "schema": SCHEMA,
        "model": run.model.to_dict(),
        "training": run.training.to_dict(),
        "history": history,
    }
    (folder / f"{run.name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_records_are_read_and_those_cut_short_are_missing(tmp_path):
    runs = [run for run, names in study.expected_runs().items() if names[0] == "parity"]
    for i, run in enumerate(runs):
        write(tmp_path, run, [0.5 + i / 1000] * (120 if i else 60))
    outcomes = study.read_outcomes(tmp_path)
    assert len(outcomes) == 59
    assert outcomes["loss_area"].to_list() == pytest.approx([math.log(0.5 + i / 1000) for i in range(1, 60)])
    assert study.analyse(outcomes)[0][-1] == "parity: 1 runs are missing: no conclusion."
    write(tmp_path, runs[0], [0.5] * 120)
    said, tables = study.analyse(study.read_outcomes(tmp_path))
    assert said[0] == "360 of 420 runs are missing."
    assert set(tables["advantages"]["task"]) == {"parity"}
    table = tmp_path / "outcomes.csv"
    study.read_outcomes(tmp_path).to_csv(table, index=False)
    pd.testing.assert_frame_equal(study.analyse(study.read_table(table))[1]["advantages"], tables["advantages"])
    pd.DataFrame({"task": []}).to_csv(table, index=False)
    with pytest.raises(InputError, match="lacks the column attention"):
        study.read_table(table)


def test_families_in_opposite_orders_are_told():
    rows = planted(tasks=["parity"])
    rows = rows[rows["frozen"] == "frozen"]
    order = {"full": 0.0, "random": 1.0, "topk": 2.0}
    ranks = rows["attention"].str.split("-").str[0].map(order)
    spread = rows.drop(columns="loss_area").assign(ln_spread=ranks)
    assert frozen_spread.by_family(rows.assign(loss_area=-ranks), spread)["opposite"].all()
    assert not frozen_spread.by_family(rows.assign(loss_area=ranks), spread)["opposite"].any()


def test_the_committed_tables_are_those_of_the_records():
    outcomes = study.read_outcomes(EXPERIMENTS / "frozen")
    assert not any(study.missing_runs(outcomes).values())
    folder = EXPERIMENTS.parent / "reports" / "frozen"
    for name, table in study.analyse(outcomes)[1].items():
        kept = pd.read_csv(folder / f"{name}.csv")
        pd.testing.assert_frame_equal(kept, table.reset_index(drop=True), check_dtype=False, rtol=1e-9)


def test_the_page_says_what_the_tables_say():
    page = (EXPERIMENTS / "must-attention-learn.md").read_text(encoding="utf-8")
    tables = {name: pd.read_csv(EXPERIMENTS.parent / "reports" / "frozen" / f"{name}.csv") for name in TABLES}

    def said(row, name):
        if math.isnan(row[name]):
            return "–"
        return f"{row[name]:.2f} ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})"

    own = tables["advantages"][tables["advantages"]["attention"] == "topk-5"].to_dict("records")
    for row in own:
        cells = (row["task"], said(row, "trained"), said(row, "frozen"), said(row, "share"), row["reading"])
        assert f"| {' | '.join(cells)} |\n" in page
    text = " ".join(page.split())
    for name, key, column, places in (
        ("advantages", "full-times-4", "share", ["even-pairs"]),
        ("freezing", "full", "cost", ["even-pairs", "stack-manipulation", "missing-duplicate"]),
    ):
        table = tables[name]
        for task in places:
            (row,) = table[(table["task"] == task) & (table["attention"] == key)].to_dict("records")
            assert said(row, column) in text
    changes = tables["straight_through"]
    for task in ("even-pairs", "missing-duplicate"):
        (row,) = changes[(changes["task"] == task) & (changes["arm"] == "trained")].to_dict("records")
        assert said(row, "change") in text
    counts = tables["expectations"]["verdict"].value_counts()
    assert (counts["as expected"], counts["these runs cannot tell"], len(counts)) == (3, 7, 2)


def test_the_figure_has_the_ratios_whose_logarithms_the_table_has():
    advantages = pd.read_csv(EXPERIMENTS.parent / "reports" / "frozen" / "advantages.csv")
    axes = frozen_figure.figure(advantages).axes
    for ax, attention in zip(axes, frozen_figure.ATTENTIONS, strict=True):
        own = advantages[advantages["attention"] == attention]
        for arm, points in zip(frozen_figure.ARMS, ax.containers, strict=True):
            assert np.log(points[0].get_xdata()).tolist() == pytest.approx(own[arm].tolist())
