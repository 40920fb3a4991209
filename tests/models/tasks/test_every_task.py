"""What holds for every task of the registry."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from semdiag_files import InputError
from semdiag_models.tasks import TASKS, find_task

GOLDEN = json.loads((Path(__file__).parent / "golden_tasks.json").read_text())
SHORTEST = {"missing-duplicate": 2, "solve-equation": 3, "listops": 599}
LENGTHS = [("listops", 599), ("listops", 640)]
LENGTHS += [
    (n, length) for n in TASKS if n != "listops" for length in (SHORTEST.get(n, 1), *range(4, 15), 39, 40, 100)
]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_the_registry_holds_the_eight_tasks_under_their_own_names():
    assert len(TASKS) == 8
    assert all(task.name == name for name, task in TASKS.items())


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("parity_check", "parity"),
        ("even_pairs", "even-pairs"),
        ("ueqpairs", "even-pairs"),
        ("missing_duplicate_string", "missing-duplicate"),
        ("missdup", "missing-duplicate"),
        ("stack_manipulation", "stack-manipulation"),
        ("stackman", "stack-manipulation"),
        ("cycle_navigation", "cycle-navigation"),
        ("cycnav", "cycle-navigation"),
        ("modular_arithmetic_brackets", "modular-arithmetic"),
        ("mab", "modular-arithmetic"),
        ("solve_equation", "solve-equation"),
        ("soleq", "solve-equation"),
        ("listops", "listops"),
    ],
)
def test_a_task_is_found_under_the_names_of_the_source_and_of_the_released_code(alias, name):
    assert find_task(alias) is find_task(name) is TASKS[name]


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(InputError, match="Did you mean 'listops'"):
        find_task("listop")


def test_every_golden_task_is_in_the_registry():
    assert {find_task(name).name for name in GOLDEN} == set(TASKS)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in GOLDEN.items() for case in cases])
def test_golden_cases_have_their_label(name, case, label_of):
    task = find_task(name)
    tokens = case["tokens"]
    if isinstance(tokens[0], str):
        tokens = task.parse(" ".join(tokens))
    assert label_of(task, tokens) == case["label"]


@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_sampled_labels_agree_with_the_independent_rule(name, length, label_of):
    task = TASKS[name]
    tokens, labels = task.sample(1000, length, seeded(length))
    assert [label_of(task, row) for row in tokens.tolist()] == labels.tolist()


@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_samples_have_the_promised_shape_type_and_range(name, length):
    task = TASKS[name]
    tokens, labels = task.sample(50, length, seeded(0))
    assert tokens.shape == (50, length)
    assert labels.shape == (50,)
    assert tokens.dtype == labels.dtype == torch.int64
    assert 0 <= tokens.min() <= tokens.max() < task.vocabulary_size
    assert 0 <= labels.min() <= labels.max() < task.classes


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_a_function_of_the_generator_alone(name):
    task = TASKS[name]
    length = task.recipe.length
    draws = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002 - it is the global state that must not matter
        draws.append(task.sample(30, length, seeded(5)))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], task.sample(30, length, seeded(6))[0])


@pytest.mark.parametrize("name", TASKS)
def test_two_draws_from_one_generator_differ(name):
    task, generator = TASKS[name], seeded(5)
    first, second = (task.sample(30, task.recipe.length, generator)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", TASKS)
def test_sampling_leaves_the_global_random_states_alone(name):
    task = TASKS[name]
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    task.sample(30, task.recipe.length, seeded(5))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("name", TASKS)
def test_lengths_without_a_string_are_refused(name):
    task = TASKS[name]
    least = SHORTEST.get(name, 1)
    with pytest.raises(
        InputError, match=rf"^{name} needs a length of at least {least}\. Got length={least - 1}\.$"
    ):
        task.sample(1, least - 1, seeded(0))


@pytest.mark.parametrize("name", TASKS)
def test_symbols_survive_printing_and_parsing(name):
    task = TASKS[name]
    assert task.parse(" ".join(task.symbols)) == list(range(len(task.symbols)))
    with pytest.raises(InputError, match=rf"^'\?' is not a symbol of {name}\."):
        task.parse(f"{task.symbols[0]} ? {task.symbols[1]}")


@pytest.mark.parametrize(
    ("name", "vocabulary", "classes", "recipe"),
    [
        ("parity", 3, 2, (40, 1000, 5, 0.1, 0.9995)),
        ("even-pairs", 3, 2, (40, 100, 5, 0.1, 0.9995)),
        ("missing-duplicate", 4, 2, (40, 250, 5, 0.1, 0.9995)),
        ("stack-manipulation", 6, 3, (40, 200, 5, 0.1, 0.9995)),
        ("cycle-navigation", 4, 5, (40, 750, 5, 0.1, 0.9995)),
        ("modular-arithmetic", 12, 5, (40, 600, 5, 0.1, 0.9995)),
        ("solve-equation", 12, 5, (40, 600, 5, 0.1, 0.9995)),
        ("listops", 16, 10, (599, 200, 10, 1.0, 0.99)),
    ],
)
def test_sizes_and_recipes_are_those_of_the_released_runs(name, vocabulary, classes, recipe):
    task = TASKS[name]
    assert (task.vocabulary_size, task.classes, task.chance) == (vocabulary, classes, 1 / classes)
    r = task.recipe
    assert (r.length, r.epochs, r.blocks, r.learning_rate, r.learning_rate_decay) == recipe


@pytest.mark.parametrize("name", TASKS)
def test_the_majority_rate_is_that_of_the_commonest_label(name, assert_share):
    task = TASKS[name]
    n = 3_000 if name == "listops" else 50_000
    labels = task.sample(n, task.recipe.length, seeded(8))[1]
    assert_share(labels.bincount().max() / n, task.majority, n)


@pytest.mark.parametrize("name", TASKS)
def test_no_shortcut_is_worse_than_the_majority(name):
    accuracy, rule = TASKS[name].shortcut
    assert accuracy >= TASKS[name].majority
    assert rule
