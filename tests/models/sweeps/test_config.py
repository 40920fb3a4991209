import pytest

from semdiag_files import InputError
from semdiag_models.sweep import read_settings, read_sweep


@pytest.fixture
def read(tmp_path):
    """Call with TOML: the settings of all runs."""

    def from_text(text):
        (tmp_path / "sweep.toml").write_text(text, encoding="utf-8")
        return read_settings(tmp_path / "sweep.toml")

    return from_text


def test_lists_multiply_and_the_first_varies_slowest(read):
    runs = read('until = 0.9\n[grid]\nseed = [1, 2]\ntask = ["parity", "listops"]\nblocks = 3\n')
    assert runs == [
        {"until": 0.9, "seed": seed, "task": task, "blocks": 3}
        for seed in (1, 2)
        for task in ("parity", "listops")
    ]


def test_the_lists_of_a_table_multiply_within_it(read):
    runs = read('[grid]\nattention = ["full", {attention = ["banded", "block"], k = [3, 5]}]\n')
    assert runs == [
        {"attention": "full"},
        *({"attention": a, "k": k} for a in ("banded", "block") for k in (3, 5)),
    ]


def test_several_grids_stand_side_by_side(read):
    runs = read('task = "parity"\n[[grid]]\nseed = [1, 2]\n[[grid]]\nheads = [2]\n')
    assert runs == [
        {"task": "parity", "seed": 1}, {"task": "parity", "seed": 2}, {"task": "parity", "heads": 2},
    ]  # fmt: skip


def test_without_a_grid_there_is_one_run(read):
    assert read('task = "parity"\n') == [{"task": "parity"}]


def test_what_a_grid_says_replaces_what_the_top_says(read):
    runs = read("blocks = 2\n[grid]\nblocks = [3, 4]\n")
    assert [run["blocks"] for run in runs] == [3, 4]


def test_a_list_of_epochs_is_one_value_and_a_list_of_lists_several(read):
    assert read("snapshots = [1, 2]\n") == [{"snapshots": [1, 2]}]
    assert read("[grid]\nsnapshots = [1, 2]\n") == [{"snapshots": [1, 2]}]
    assert read("[grid]\nsnapshots = [[1], [2, 3]]\n") == [{"snapshots": [1]}, {"snapshots": [2, 3]}]


def test_lists_at_the_top_multiply_too(read):
    assert read("seed = [1, 2]\n[grid]\nheads = [1, 2]\n") == [
        {"seed": seed, "heads": heads} for seed in (1, 2) for heads in (1, 2)
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[grid]\n# a comment\nseed = []\n", "asks for no run: a list in it is empty."),
        ("grid = 3\n", r"grid must be a table, \[grid\] or \[\[grid\]\]\. Got 3\."),
        ("[grid]\nseed = 3\nx = [{seed = 4}]\n", "seed is set twice in one table of the grid."),
    ],
)
def test_what_is_no_grid_is_refused(read, text, problem):
    with pytest.raises(InputError, match=problem):
        read(text)


def test_a_file_that_is_not_there_or_no_toml_is_refused(read, tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.toml does not exist\."):
        read_settings(tmp_path / "nowhere.toml")
    with pytest.raises(InputError, match=r"cannot be read \(.*at line 2"):
        read("task = 'parity'\nseed = = 3\n")
    with pytest.raises(InputError, match="is a folder"):
        read_settings(tmp_path)


def test_of_very_many_problems_the_first_are_told(tmp_path):
    text = "".join(f"[[grid]]\nkey{i} = 1\n" for i in range(101))
    (tmp_path / "sweep.toml").write_text(text)
    with pytest.raises(InputError, match=r"has 101 problems; nothing was run\. Unknown key 'key0'") as found:
        read_sweep(tmp_path / "sweep.toml")
    assert str(found.value).count("Unknown key") == 20


@pytest.mark.slow
def test_a_grid_of_too_many_runs_is_refused_before_they_are_made(read):
    text = "".join(f"a{i} = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n" for i in range(30))
    for grid in (f"[grid]\n{text}", f"[grid]\nx = [{{{text[:-1].replace(chr(10), ', ')}}}]\n"):
        with pytest.raises(InputError, match="asks for more than 100,000 runs"):
            read(grid)
