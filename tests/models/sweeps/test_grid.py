import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semdiag_files import InputError
from semdiag_models import ListOpsTrees, ModelConfig, TrainingConfig, configure, find_task
from semdiag_models.sweep import identity, name_run, read_sweep

EXPERIMENTS = Path(__file__).parents[3] / "experiments"


@pytest.fixture
def sweep(tmp_path):
    """Call with TOML: the runs."""

    def from_text(text):
        (tmp_path / "sweep.toml").write_text(text, encoding="utf-8")
        return read_sweep(tmp_path / "sweep.toml")

    return from_text


def problems(sweep, text):
    with pytest.raises(InputError) as caught:
        sweep(text)
    return str(caught.value).partition("; nothing was run. ")[2]


def test_a_run_is_the_recipe_with_what_the_file_says(sweep):
    (run,) = sweep('task = "ueqpairs"\nattention = "topk"\nk = 9\nseed = 7\nuntil = 0.9\npad_as_token = true\n')
    chosen = {"attention": "topk", "k": 9, "seed": 7, "until": 0.9, "pad_as_token": True}
    assert (run.model, run.training) == configure(find_task("even-pairs"), chosen)
    assert (run.model.length, run.training.length) == (45, 40)


def test_random_attention_keeps_other_keys_for_every_seed(sweep):
    runs = sweep('task = "parity"\nattention = "random"\nk = 5\n[grid]\nseed = [3, 4]\n')
    assert [run.model.selection_seed for run in runs] == [3, 4]


def test_runs_that_two_grids_share_are_run_once(sweep):
    runs = sweep('task = "parity"\n[[grid]]\nheads = [1, 2]\n[[grid]]\nheads = [2, 4]\n')
    assert [run.model.heads for run in runs] == [1, 2, 4]


def test_trees_of_other_sizes_are_a_task_of_their_own(sweep):
    (run,) = sweep('task = "listops"\nshortest = 20\nlongest = 30\nmax_depth = 4\nblocks = 2\n')
    assert run.training.length == run.model.length == 30
    assert run.name.startswith("listops-20-30-depth-4-full-seed-153476998-blocks-2-")
    assert TrainingConfig.from_dict(run.training.to_dict()).listops.max_depth == 4


def test_snapshots_past_the_last_epoch_are_left_out(sweep):
    runs = sweep("snapshots = [1, 9]\n[grid]\ntask = [{task = 'parity', epochs = 5}, 'even-pairs']\n")
    assert [run.training.snapshots for run in runs] == [(1,), (1, 9)]


def test_a_text_stands_beside_the_file(sweep, story, tmp_path):
    (tmp_path / "story.txt").write_bytes(story.read_bytes())
    base = 'task = "text"\ntext = "story.txt"\nvocabulary = 40\n'
    runs = sweep(base + '[grid]\nattention = ["full", {attention = "topk", k = 3}]\n')
    assert all(run.training.text.vocabulary == 40 for run in runs)
    assert runs[0].name.startswith("text-story-")
    told = 'The task text needs a file: text = "FILE", beside the sweep\'s own file.'
    assert problems(sweep, 'task = "text"\n') == told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "k = 50\n",
            "full attention takes no k; banded, block, topk, bottomk, random, redrawn, lsh, routing, indexer and "
            "moba do. "
            "Got k=50.",
        ),
        (
            '[grid]\nattention = [{attention = "topk", k = [5, 50]}]\n',
            "k must be at most the sequence length. Got k=50, length=40.",
        ),
        (
            '[grid]\nattention = ["banded", "full"]\n',
            "banded attention needs k, the number of keys kept per query.",
        ),
        (
            '[grid]\nattention = [{attention = "topk", k = 50, global_tokens = 3}]\n',
            "topk attention takes no global_tokens; banded and block do. Got global_tokens=3.",
        ),
        ("longest = 70\n", "longest belongs to the task listops. Got task 'even-pairs'."),
        ('text = "a.txt"\n', "text belongs to the task text. Got task 'even-pairs'."),
        ("blocks = 0\n", "blocks must lie in [1, 100000]. Got blocks=0."),
        ("dropout = 1.5\n", "dropout must lie in [0, 1). Got dropout=1.5."),
        ('[grid]\nblocks = ["5"]\n', "blocks must be int. Got '5'."),
        ("[grid]\nblocks = true\n", "blocks must be int. Got True."),
        ('vocabulary = "many"\n', "vocabulary must be int. Got 'many'."),
    ],
)
def test_what_no_run_can_have_is_told(sweep, text, expected):
    assert problems(sweep, 'task = "even-pairs"\n' + text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch = 3\n", "Unknown key 'epoch'. Did you mean 'epochs'?"),
        ("[grid]\nk = [{kk = 3}]\n", "Unknown key 'kk'."),
        ('[grid]\nactivation = ["relu", "gleu"]\n', "Unknown activation 'gleu'."),
        ('[[grid]]\n[[grid]]\nnorm = "past"\n', "Unknown norm 'past'."),
        ('[grid]\nx = [{attention = "topp", k = 3}]\n', "Unknown attention 'topp'."),
    ],
)
def test_unknown_names_are_told(sweep, text, expected):
    assert problems(sweep, 'task = "even-pairs"\n' + text).startswith(expected)
    assert problems(sweep, '[grid]\ntask = ["evenpairs"]\n').startswith("Unknown task 'evenpairs'.")


def test_lengths_without_a_string_are_found_before_anything_runs(sweep):
    told = "listops needs a length of at least 599. Got length=50."
    assert problems(sweep, '[grid]\ntask = ["parity", "listops"]\nlength = [50]\n') == told


def test_a_file_without_a_task_is_refused(sweep):
    assert "A run has no task" in problems(sweep, "seed = 3\n")


def test_two_lengths_of_one_run_are_refused(sweep):
    problem = problems(sweep, 'task = "parity"\n[grid]\nepochs = [3, 5]\n')
    assert re.match(r"parity-full-seed-153476998-\w+: one run cannot have two numbers of epochs", problem)


def test_the_error_is_one_line_with_all_problems(sweep):
    with pytest.raises(InputError, match=r"sweep\.toml has 2 problems; nothing was run\. .*'gleu'.*'prefix'"):
        sweep('task = "parity"\n[grid]\nx = [{activation = "gleu"}, {norm = "prefix"}]\nseed = [1, 2]\n')


fields = st.fixed_dictionaries(
    {},
    optional={
        "attention": st.sampled_from(["banded", "topk"]),
        "heads": st.integers(1, 4),
        "width": st.sampled_from([8, 16, 64]),
        "norm": st.sampled_from(["pre", "post"]),
        "pooling": st.sampled_from(["mean", "cls"]),
        "activation": st.sampled_from(["relu", "gelu", "mish"]),
        "dropout": st.sampled_from([0.0, 0.01, 0.1]),
        "learning_rate": st.sampled_from([0.1, 0.10001, 1.0]),
        "optimizer": st.sampled_from(["sgd", "adam"]),
        "batch_size": st.integers(25, 27),
        "seed": st.integers(0, 3),
        "train_samples": st.sampled_from([5000, 500]),
        "length": st.sampled_from([20, 40]),
    },
)


def built(chosen):
    k = {"k": 5} if "attention" in chosen else {}
    return configure(find_task("parity"), {**chosen, **k})


@pytest.mark.slow
@given(fields, fields)
def test_names_are_equal_exactly_for_equal_configurations(one, other):
    first, second = built(one), built(other)
    assert (name_run(*first) == name_run(*second)) == (first == second)
    assert (identity(*first) == identity(*second)) == (first == second)
    assert re.fullmatch(r"[\w.-]{1,110}", name_run(*first))


def test_how_long_a_run_goes_on_is_not_its_identity():
    model, training = built({"attention": "topk"})
    longer = replace(training, epochs=7, until=0.5, snapshots=(1,))
    assert name_run(model, longer) == name_run(model, training)


def test_whole_numbers_and_fractions_are_one_learning_rate():
    assert identity(*built({"learning_rate": 1})) == identity(*built({"learning_rate": 1.0}))


def test_a_field_at_its_default_does_not_count():
    """So that a field which semdiag gains later renames no folder: these hashes were computed without some."""
    model = ModelConfig(3, 2, 40)
    assert identity(model, TrainingConfig("parity", 40, 1)) == identity(
        replace(model, norm="pre", heads=1), TrainingConfig("parity", 40, 1, listops=None)
    )
    other = TrainingConfig("listops", 599, 1, listops=ListOpsTrees())
    assert identity(model, other) != identity(model, replace(other, listops=None))


@pytest.mark.parametrize(
    ("file", "runs"),
    [
        ("first.toml", 6),
        ("study.toml", 3 * 6 * 3),
        ("speed.toml", 360),
        ("dose.toml", 378),
        ("paper.toml", 8 * 15 * 10),
        ("listops-ablations.toml", 340),
    ],
)
def test_the_shipped_sweeps_have_the_runs_they_promise(file, runs):
    assert len(read_sweep(EXPERIMENTS / file)) == runs


@pytest.mark.slow
def test_the_papers_masks_are_the_fifteen():
    labels = {run.model.attention_label for run in read_sweep(EXPERIMENTS / "paper.toml")}
    local = {
        f"{kind}-{k}{g}" for kind in ("banded", "block") for k in (5, 9) for g in ("", "-global-1", "-global-3")
    }
    assert labels == {"full", "topk-5", "topk-9", *local}


def test_only_listops_has_trees():
    with pytest.raises(InputError, match="Only the task listops has trees"):
        TrainingConfig("parity", 40, 1, listops=ListOpsTrees())
