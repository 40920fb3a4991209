"""The tables: saved, loaded, joined, taken apart and shown."""

import copy
import json
import pickle

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements, write_sums
from semdiag.measuring.survey import survey
from semdiag.measuring.table import TABLES, column_types, from_csv_text, read_parquet
from semdiag.questions.bounds.measure import CONSTANTS, BoundsPlan
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.landscape.measure import LandscapePlan
from semdiag.questions.lipschitz.measure import LipschitzPlan
from semdiag.questions.mask_stability.measure import MASKS, NoisePlan
from semdiag.questions.registry import tables as declared_tables
from semdiag.questions.stability.measure import SecantsPlan
from semdiag_files import InputError


@pytest.fixture(scope="module")
def measured(tiny_runs):
    """Both tiny runs, with counterfactuals (so that there are missing values) and infinite separations."""
    return survey([tiny_runs.full, tiny_runs.topk], Conditions(samples=5, k=(2,)))


@pytest.mark.slow
def test_a_round_trip_changes_nothing(measured, tmp_path):
    measured.save(tmp_path / "a" / "b")
    loaded = Measurements.load(tmp_path / "a" / "b")
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(measured, name), check_exact=True)
    assert loaded.provenance == measured.provenance
    assert np.isposinf(loaded.queries["separation"]).any()
    assert loaded.queries["dispersion_k2"].isna().any()


def test_a_round_trip_keeps_what_is_unknown_and_what_is_empty(made_up, tmp_path):
    measured = made_up(("x.pt", [0.1, 0.2, np.nan, np.inf], {"task": None, "seed": None, "accuracy": None}))
    measured.save(tmp_path)
    loaded = Measurements.load(str(tmp_path))
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(measured, name), check_exact=True)
    assert loaded.models[["task", "seed"]].isna().all(axis=None)


def save_without_sums(measured, folder):
    """As versions before ``SHA256SUMS`` did; what is changed then is seen by the readers themselves."""
    measured.save(folder)
    (folder / "SHA256SUMS").unlink()


@pytest.mark.slow
def test_every_change_of_a_saved_file_is_refused(made_up, tmp_path):
    """Of every file one bit of every 7th byte, of the checksums' own, too; then all is as it was."""
    measured = made_up(("x.pt", [0.5, 0.25, 1, 2], {"task": None}))
    measured.save(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files if file.suffix != ".parquet"] == ["SHA256SUMS", "provenance.json"]
    for file in files:
        content = file.read_bytes()
        for at in range(0, len(content), 7):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            with pytest.raises(InputError, match="differs from what"):
                Measurements.load(tmp_path)
        file.write_bytes(content)
    loaded = Measurements.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.queries, measured.queries, check_exact=True)


@pytest.mark.slow
def test_files_added_to_saved_ones_or_taken_away_are_refused_and_older_folders_load(measured, tmp_path):
    measured.save(tmp_path)
    for change in (lambda: (tmp_path / "loads.parquet").unlink(), lambda: (tmp_path / "masks.parquet").touch()):
        change()
        with pytest.raises(InputError, match=r"(loads|masks)\.parquet differs from what"):
            Measurements.load(tmp_path)
        (tmp_path / "masks.parquet").unlink(missing_ok=True)
        save_without_sums(measured, tmp_path)
        assert len(Measurements.load(tmp_path).queries) == len(measured.queries)
        measured.save(tmp_path)


def test_a_table_of_another_version_is_kept_and_its_file_is_checked(measured, tmp_path):
    measured.save(tmp_path / "kept")
    other = tmp_path / "kept" / "projections.parquet"
    pd.DataFrame({"model": measured.models["model"], "turned": 1.0}).to_parquet(other)
    recorded = [file.name for file in other.parent.iterdir() if file.name != "SHA256SUMS"]
    write_sums(other.parent, recorded)
    assert len(Measurements.load(other.parent).queries) == len(measured.queries)
    other.write_bytes(b"changed")
    with pytest.raises(InputError, match=r"projections\.parquet differs from what"):
        Measurements.load(other.parent)
    (tmp_path / "outside").touch()
    write_sums(other.parent, [*recorded, "../outside"])
    with pytest.raises(InputError, match="outside differs from what"):  # no file elsewhere is opened
        Measurements.load(other.parent)


def test_saving_twice_keeps_the_later(measured, made_up, tmp_path):
    measured.save(tmp_path)
    made_up(("x.pt", [1, 2, 3, 4], {})).save(tmp_path)
    assert Measurements.load(tmp_path).models["model"].tolist() == ["x.pt"]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("damage", [b"", b"not a table at all", None])
def test_a_damaged_table_is_refused(measured, tmp_path, table, damage):
    save_without_sums(measured, tmp_path)
    file = tmp_path / f"{table}.parquet"
    file.write_bytes(file.read_bytes()[:-30] if damage is None else damage)
    with pytest.raises(
        InputError, match=r"does not hold saved measurements \(.*semdiag report --keep-queries"
    ) as refused:
        Measurements.load(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["", "{", "\xff"])
def test_damaged_provenance_is_refused(measured, tmp_path, content):
    save_without_sums(measured, tmp_path)
    (tmp_path / "provenance.json").write_bytes(content.encode("latin1"))
    with pytest.raises(InputError, match="does not hold saved measurements"):
        Measurements.load(tmp_path)


@pytest.mark.parametrize("name", [*(f"{table}.parquet" for table in TABLES), "provenance.json"])
def test_a_missing_file_is_refused(measured, tmp_path, name):
    save_without_sums(measured, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(InputError, match=f"does not hold saved measurements .*{name}"):
        Measurements.load(tmp_path)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_without_its_columns_is_refused(measured, tmp_path, table):
    save_without_sums(measured, tmp_path)
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / f"{table}.parquet")
    with pytest.raises(InputError, match=rf"{table}\.parquet lacks the column model\. Measure again"):
        Measurements.load(tmp_path)


def test_a_column_of_another_kind_is_refused(measured, tmp_path):
    save_without_sums(measured, tmp_path)
    measured.queries.astype({"layer": "float64"}).to_parquet(tmp_path / "queries.parquet")
    with pytest.raises(
        InputError, match=r"queries\.parquet has float64 in the column layer, which should be int32"
    ):
        Measurements.load(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere does not hold saved measurements"):
        Measurements.load(tmp_path / "nowhere")


@pytest.mark.slow
def test_models_that_say_nothing_of_global_tokens_norm_and_pooling_have_the_usual_ones(made_up, tmp_path):
    old = made_up(("a.pt", [1, 2, 3, 4], {}))
    older = old.replace(models=old.models.drop(columns=["global_tokens", "norm", "pooling"]))
    for found in (old, older):
        assert found.models[["global_tokens", "norm", "pooling"]].values.tolist() == [[0, "pre", "mean"]]
    post = made_up(("b.pt", [1, 2, 3, 4], {"norm": "post"}))
    save_without_sums(post, tmp_path)
    assert Measurements.load(tmp_path).models["norm"].tolist() == ["post"]
    file = tmp_path / "models.parquet"
    post.models.drop(columns=["global_tokens", "norm", "pooling"]).to_parquet(file, index=False)
    assert Measurements.load(tmp_path).models["norm"].tolist() == ["pre"]


def test_joining_puts_tables_below_each_other(made_up):
    a, b = made_up(("a.pt", [1, 2, 3, 4], {})), made_up(("b.pt", [5, 6, 7, 8], {"attention": "topk", "k": 2}))
    joined = Measurements.concat([a, b])
    assert joined.models["model"].tolist() == ["a.pt", "b.pt"]
    assert joined.queries["dispersion"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert joined.queries.index.is_unique
    assert joined.models["k"].tolist() == [pd.NA, 2]
    assert joined.provenance == a.provenance
    assert joined.non_finite.empty


def test_joining_keeps_the_kinds_of_columns_whichever_table_is_empty(made_up):
    a, b = made_up(("a.pt", [1, 2, 3, 4], {})), made_up(("b.pt", [5, 6, 7, 8], {}))
    empty = b.replace(history=b.history[:0].astype({"epoch": "float64"}))
    for parts in ([a, empty], [empty, a]):
        pd.testing.assert_frame_equal(Measurements.concat(parts).history, a.history)


def test_joining_keeps_what_all_parts_say_of_themselves_and_nothing_else(made_up):
    names = ("a.pt", "b.pt", "c.pt")
    says = (
        {"device": "cpu", "dtype": "float32", "seed": 0, "noise": [0.1]},
        {"device": "cpu", "dtype": "float64", "seed": 0, "noise": [0.1]},
        {"device": "cpu", "dtype": "float64", "noise": [0.1], "more": 1},
    )
    parts = [made_up((name, [1, 2, 3, 4], {})).replace(said) for name, said in zip(names, says, strict=True)]
    assert Measurements.concat(parts).provenance == {"device": "cpu", "noise": [0.1]}
    assert Measurements.concat(parts[:1]).provenance == says[0]
    assert [part.provenance for part in parts] == [*says]


def test_a_model_cannot_be_joined_with_itself(made_up):
    a, b = made_up(("a.pt", [1, 2, 3, 4], {})), made_up(("b.pt", [5, 6, 7, 8], {}))
    with pytest.raises(InputError, match=r"^b\.pt is named twice\.$"):
        Measurements.concat([b, a, b])


def test_of_one_model_every_table_holds_its_rows_only(measured, tiny_runs):
    own = measured.of(str(tiny_runs.topk))
    assert len(own.models) == 1
    assert len(own.queries) == 5 * 12 * 2 * 2
    for name in ("queries", "loads", "history"):
        assert set(getattr(own, name)["model"]) == {str(tiny_runs.topk)}
    assert own.provenance == measured.provenance


def test_the_page_in_a_notebook_shows_percentiles_per_layer(measured, tiny_runs):
    page = measured._repr_html_()
    assert page.count("<table") == 2
    assert str(tiny_runs.full) in page
    assert all(f"<th>{name}</th>" in page for name in ("layer", "head", "queries", "p50", "p95", "p100"))
    median = measured.of(str(tiny_runs.full)).queries.query("layer == 1 and head == 0")["dispersion"].median()
    assert f"<td>{median:.3g}</td>" in page


def test_the_page_in_a_notebook_escapes_what_comes_from_files(made_up):
    hostile = "<script>alert('1')</script>&.pt"
    page = made_up((hostile, [1, 2, 3, 4], {"task": "<b>bold</b>", "attention": "<i>"}))._repr_html_()
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&amp;.pt" in page


def test_provenance_is_plain_json(measured, tmp_path):
    measured.save(tmp_path)
    provenance = json.loads((tmp_path / "provenance.json").read_text(encoding="utf-8"))
    assert {"semdiag", "torch", "device", "dtype", "seed", "samples"} <= set(provenance)


@pytest.fixture(scope="module")
def with_theory(tiny_runs):
    plans = (
        SecantsPlan(), BoundsPlan(), NoisePlan(draws=1), KSweepPlan(), LandscapePlan(grid=3),
        LipschitzPlan(5, 2, 2, 5),
    )  # fmt: skip
    conditions = Conditions(samples=5, plans=plans)
    return survey([tiny_runs.full, tiny_runs.topk], conditions)


@pytest.mark.slow
def test_optional_tables_survive_a_round_trip_and_a_choice(with_theory, tmp_path):
    with_theory.save(tmp_path)
    loaded = Measurements.load(tmp_path)
    first = with_theory.models["model"].iloc[0]
    names = [name for name in declared_tables() if name in with_theory]
    assert {"secants", "constants", "parameters", "masks", "noise_effects", "sweep"} <= set(names)
    for name in names:
        whole = getattr(with_theory, name)
        pd.testing.assert_frame_equal(getattr(loaded, name), whole, check_exact=True)
        assert set(getattr(with_theory.of(first), name)["model"]) == {first}
        assert whole["model"].nunique() == 2
        found = column_types(whole)
        assert declared_tables()[name].columns.items() <= found.items()
        assert found.keys() - declared_tables()[name].columns.keys() == (
            {"keeps_first"} if name == "heads" else set()
        )


@pytest.mark.slow
def test_what_was_not_measured_is_empty(measured, with_theory, tmp_path):
    with_theory.save(tmp_path)
    measured.save(tmp_path)  # leaves nothing of the earlier ones
    loaded = Measurements.load(tmp_path)
    unmeasured = set(declared_tables()) - {"calls", "heads"}  # which every forward pass fills
    assert {name for name in declared_tables() if name in loaded} == {"calls", "heads"}
    for name in unmeasured:
        table = declared_tables()[name]
        pd.testing.assert_frame_equal(loaded[table], table.empty())
        pd.testing.assert_frame_equal(measured[table], table.empty())
        assert not (tmp_path / f"{name}.parquet").exists()


def test_a_damaged_optional_table_is_refused(with_theory, tmp_path):
    save_without_sums(with_theory, tmp_path)
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "secants.parquet")
    with pytest.raises(InputError, match=r"secants\.parquet lacks the column model\. Measure again"):
        Measurements.load(tmp_path, declared_tables().values())
    with pytest.raises(InputError, match=r"secants\.parquet is no table of measurements"):
        Measurements.load(tmp_path)


def test_measured_and_unmeasured_models_join(with_theory, made_up):
    joined = Measurements.concat([made_up(("x.pt", [1, 2, 3, 4], {})), with_theory])
    assert len(joined.secants) == len(with_theory.secants)
    assert joined.of("x.pt")[CONSTANTS].empty


@pytest.mark.slow
def test_a_column_of_another_kind_is_refused_with_its_file(with_theory, tmp_path):
    save_without_sums(with_theory, tmp_path)
    file = tmp_path / "masks.parquet"
    with_theory.masks.assign(agreement="high").to_parquet(file)
    with pytest.raises(
        InputError, match=r"masks\.parquet has \w+ in the column agreement, which should be float32"
    ):
        Measurements.load(tmp_path, declared_tables().values())
    with_theory.masks.astype({"agreement": "float64", "sample": "int64"}).to_parquet(file)  # as once written
    assert len(Measurements.load(tmp_path).masks) == len(with_theory.masks)


def test_a_table_that_there_is_not_is_refused(made_up):
    measured = made_up(("x.pt", [1, 2, 3, 4], {}))
    for name in ("mask", "masks", "provenences"):
        with pytest.raises(AttributeError, match=f"have no table '{name}'. They have models, queries"):
            getattr(measured, name)
    assert not hasattr(measured, "_masks")


def test_replacing_leaves_the_first_as_it_was(made_up, with_theory):
    measured = made_up(("x.pt", [1, 2, 3, 4], {}))
    said = dict(measured.provenance)
    other = measured.replace({"seed": 5}, masks=with_theory.masks, queries=measured.queries[:2])
    assert (other.masks is with_theory.masks, len(other.queries), other.provenance) == (True, 2, {"seed": 5})
    assert other.loads is measured.loads
    assert (len(measured[MASKS]), len(measured.queries), measured.provenance) == (0, 4, said)
    third = other.replace(secants=with_theory.secants)
    assert (third.masks is other.masks, third.provenance) == (True, {"seed": 5})


def test_tables_are_listed_and_shown(with_theory):
    assert {*TABLES, "calls", "remarks", "masks", "secants", "sweep"} <= set(dir(with_theory))
    shown = repr(with_theory)
    assert shown.startswith("Measurements of 2 models: models (2 rows), queries (480 rows)")
    assert f"masks ({len(with_theory.masks):,} rows)" in shown
    assert "runs" not in shown


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_every_table(with_theory, again):
    found = again(with_theory)
    assert found.provenance == with_theory.provenance
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(found, name), getattr(with_theory, name))
    for table in declared_tables().values():
        pd.testing.assert_frame_equal(found[table], with_theory[table])


def test_nothing_cannot_be_joined():
    with pytest.raises(InputError, match=r"^There are no measurements to join\.$"):
        Measurements.concat([])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_of_ten_thousand_columns_is_read_and_one_more_is_refused(kind, tmp_path):
    for columns in (10_000, 10_001):
        table = pd.DataFrame([range(columns)], columns=[f"c{n}" for n in range(columns)])
        if kind == "parquet":
            table.to_parquet(tmp_path / "t.parquet")
            read, source = read_parquet, tmp_path / "t.parquet"
        else:
            read, source = from_csv_text, table.to_csv(index=False).encode()
        if columns == 10_000:
            assert read(source).shape == (1, columns)
        else:
            with pytest.raises(ValueError, match=r"10,001 cells; a table has up to 10,000"):
                read(source)
