"""Which checkpoints a command is about."""

import pytest

from semdiag.capturing.loading import find_checkpoints, refuse_other_kinds, without_other_files
from semdiag_files import InputError


def touch(folder, *names):
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def names(found, folder):
    return [path.relative_to(folder).as_posix() for path in found]


@pytest.mark.parametrize("models", [None, []])
def test_nothing_named_means_the_last_snapshot_of_every_run_here(here, models):
    touch(
        here, "checkpoints/b/last.pt", "checkpoints/b/best.pt", "checkpoints/b/epoch-0.pt", "checkpoints/a/last.pt"
    )
    touch(here, "checkpoints/papers/missdup_best.pt", "checkpoints/a/history.csv", "elsewhere/last.pt")
    found = find_checkpoints(models)
    assert names(found, ".") == [
        "checkpoints/a/last.pt",
        "checkpoints/b/last.pt",
        "checkpoints/papers/missdup_best.pt",
    ]


def test_the_environment_may_name_another_folder(here, monkeypatch):
    touch(here, "checkpoints/a/last.pt", "elsewhere/c/last.pt")
    monkeypatch.setenv("SEMDIAG_CHECKPOINTS", str(here / "elsewhere"))
    assert names(find_checkpoints(None), here) == ["elsewhere/c/last.pt"]


@pytest.mark.parametrize("make", [False, True])
def test_when_there_is_none_the_message_says_how_to_make_one(here, make):
    if make:
        (here / "checkpoints").mkdir()
    with pytest.raises(
        InputError, match=r"^No checkpoint in checkpoints\. .* semdiag train even-pairs --attention topk"
    ):
        find_checkpoints(None)


def test_named_files_are_taken_as_they_are_and_in_their_order(here):
    touch(here, "run/last.pt", "run/best.pt", "run/epoch-0.pt")
    models = [here / "run/epoch-0.pt", here / "nowhere.pt", here / "run/best.pt"]
    assert find_checkpoints(models) == models


def test_a_named_folder_stands_for_the_runs_in_it(here):
    touch(here, "runs/a/last.pt", "runs/a/best.pt", "runs/b/c/last.pt", "runs/only_best/best.pt", "run/last.pt")
    found = find_checkpoints([here / "run", here / "runs"])
    assert names(found, here) == ["run/last.pt", "runs/a/last.pt", "runs/b/c/last.pt", "runs/only_best/best.pt"]


def test_a_named_folder_without_checkpoints_is_refused(here):
    (here / "empty").mkdir()
    with pytest.raises(InputError, match=r"^The folder .*empty holds no checkpoint \(\.pt\)\.$"):
        find_checkpoints([here / "empty"])


def test_hidden_folders_of_a_named_folder_are_left_out(here):
    touch(here, "a/last.pt", ".venv/torch/test.pt", "a/.old/last.pt", ".runs/b/last.pt")
    assert names(find_checkpoints([here]), here) == ["a/last.pt"]
    assert names(find_checkpoints([here / ".runs"]), here) == [".runs/b/last.pt"]


def test_files_beside_checkpoints_are_left_out_of_a_star(here):
    models = [here / "a.pt", here / "README.md", here / "manifest.json", here / "missing.md"]
    for model in models[:3]:
        model.write_text("")
    kept, others = without_other_files(models)
    assert (kept, others) == ([models[0], models[3]], models[1:3])
    assert without_other_files([models[1]]) == ([models[1]], [])


def test_a_program_is_told_which_of_its_functions_builds(here):
    path = here / "mygpt.py"
    path.write_text("raise SystemExit\ndef _own(): ...\ndef size(n): ...\ndef build(n=3): ...\nclass A: ...\n")
    with pytest.raises(InputError, match=r"mygpt\.py is a program: .* Did you mean mygpt:build\?"):
        refuse_other_kinds(path, [])
    path.write_text("def (")
    with pytest.raises(InputError, match="It has none that takes no arguments"):
        refuse_other_kinds(path, [])
