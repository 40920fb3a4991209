import pytest

from semdiag_models.reading import InputError
from semdiag_models.sweep import SweepError, read_settings, read_sweep


@pytest.fixture
def read(tmp_path):
    """Call with TOML: the plain values of all runs, and the problems."""

    def from_text(text):
        (tmp_path / "sweep.toml").write_text(text, encoding="utf-8")
        found, problems = read_settings(tmp_path / "sweep.toml")
        return [{key: s.value for key, s in settings.items()} for settings in found], problems

    return from_text


def test_lists_multiply_and_the_first_varies_slowest(read):
    runs, problems = read('until = 0.9\n[grid]\nseed = [1, 2]\ntask = ["parity", "listops"]\nblocks = 3\n')
    assert not problems
    assert runs == [
        {"until": 0.9, "seed": seed, "task": task, "blocks": 3}
        for seed in (1, 2)
        for task in ("parity", "listops")
    ]


def test_the_lists_of_a_table_multiply_within_it(read):
    runs, problems = read('[grid]\nattention = ["full", {attention = ["banded", "block"], k = [3, 5]}]\n')
    assert not problems
    assert runs == [
        {"attention": "full"},
        *({"attention": a, "k": k} for a in ("banded", "block") for k in (3, 5)),
    ]


def test_several_grids_stand_side_by_side(read):
    runs, problems = read('task = "parity"\n[[grid]]\nseed = [1, 2]\n[[grid]]\nheads = [2]\n')
    assert not problems
    assert runs == [
        {"task": "parity", "seed": 1}, {"task": "parity", "seed": 2}, {"task": "parity", "heads": 2},
    ]  # fmt: skip


def test_without_a_grid_there_is_one_run(read):
    assert read('task = "parity"\n') == ([{"task": "parity"}], [])


def test_what_a_grid_says_replaces_what_the_top_says(read):
    runs, _ = read("blocks = 2\n[grid]\nblocks = [3, 4]\n")
    assert [run["blocks"] for run in runs] == [3, 4]


def test_a_list_of_epochs_is_one_value_and_a_list_of_lists_several(read):
    assert read("snapshots = [1, 2]\n")[0] == [{"snapshots": [1, 2]}]
    assert read("[grid]\nsnapshots = [1, 2]\n")[0] == [{"snapshots": [1, 2]}]
    assert read("[grid]\nsnapshots = [[1], [2, 3]]\n")[0] == [{"snapshots": [1]}, {"snapshots": [2, 3]}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("epoch = 3\n", "epoch: Unknown key 'epoch'. Did you mean 'epochs'?"),
        ("\nseed = [1, 2]\n", "seed: a list multiplies the runs, and stands in [grid]."),
        ("[grid]\n# a comment\nseed = []\n", "grid.seed: the list is empty."),
        ('[grid]\nblocks = ["5"]\n', "grid.blocks[0]: blocks must be int. Got '5'."),
        ("[grid]\nblocks = 0\n", "grid.blocks: blocks must lie in [1, 100000]. Got blocks=0."),
        ("dropout = 1.5\n", "dropout: dropout must lie in [0, 1). Got dropout=1.5."),
        ('[grid]\nactivation = ["relu", "gleu"]\n', "grid.activation[1]: Unknown activation 'gleu'."),
        ('[[grid]]\n[[grid]]\nnorm = "past"\n', "grid[1].norm: Unknown norm 'past'."),
        ('[grid]\ntask = ["evenpairs"]\n', "grid.task[0]: Unknown task 'evenpairs'."),
        ('[grid]\nx = [{attention = "topp", k = 3}]\n', "grid.x[0].attention: Unknown attention 'topp'."),
        ("[grid]\nk = [{kk = 3}]\n", "grid.k[0].kk: Unknown key 'kk'."),
        ("[grid]\nblocks = true\n", "grid.blocks: blocks must be int. Got True."),
        ('text = "a.txt"\nvocabulary = "many"\n', "vocabulary: vocabulary must be int. Got 'many'."),
        ("grid = 3\n", "grid: must be a table, [grid] or [[grid]]. Got 3."),
        (
            "[grid]\nseed = 3\nx = [{seed = 4}]\n",
            "grid.x[0].seed: seed is also set at grid.seed.",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(read, text, problem):
    (found,) = read(text)[1]
    assert found.startswith(problem)


def test_all_problems_are_found_at_once(read):
    text = 'epoch = 1\nnorm = "no"\n[grid]\ntask = ["parrot"]\nattention = ["fool"]\nwidth = [0]\nheads = [0]\n'
    assert [problem.split(":")[0] for problem in read(text)[1]] == [
        "epoch",
        "norm",
        "grid.task[0]",
        "grid.attention[0]",
        "grid.width[0]",
        "grid.heads[0]",
    ]


def test_a_file_that_is_not_there_or_no_toml_is_refused(read, tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.toml does not exist\."):
        read_settings(tmp_path / "nowhere.toml")
    with pytest.raises(InputError, match=r"cannot be read \(.*at line 2"):
        read("task = 'parity'\nseed = = 3\n")
    with pytest.raises(InputError, match="is a folder"):
        read_settings(tmp_path)


def test_of_very_many_problems_the_first_are_told(tmp_path):
    (tmp_path / "sweep.toml").write_text("".join(f"key{i} = 1\n" for i in range(1001)))
    with pytest.raises(SweepError, match=r"has 1001 problems; nothing was run\. key0: Unknown key") as found:
        read_sweep(tmp_path / "sweep.toml")
    assert len(found.value.problems) == 1000
