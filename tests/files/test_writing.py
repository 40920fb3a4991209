"""What is written is on the disk before it has its name, and the name is there, too."""

import os
import re
import stat

import pytest

from semdiag.commands.sweep_results import write_results
from semdiag_files import InputError, write_text
from semdiag_models.sweep import read_settings


@pytest.fixture
def synced(monkeypatch):
    """The kinds of what was brought to the disk, in order."""
    kinds = []

    def remember(descriptor):
        kinds.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", remember)
    return kinds


def test_file_and_folder_are_brought_to_the_disk(tmp_path, synced):
    write_text(tmp_path / "history.csv", "epoch\n")
    assert (tmp_path / "history.csv").read_bytes() == b"epoch\n"
    assert synced == ["file", "folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"]


def test_an_interruption_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    (tmp_path / "history.csv").write_text("old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "history.csv", "new")
    assert (tmp_path / "history.csv").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"]


def test_an_error_names_the_file_that_the_user_named(tmp_path):
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", tmp_path / "nowhere" / "file.txt"):
        with pytest.raises(OSError, match=re.escape(f"'{place}'")) as failed:
            write_text(place, "text")
        assert failed.value.filename == str(place)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_results_of_a_sweep_are_brought_to_the_disk(tmp_path, synced):
    write_results(tmp_path, [], {})
    assert synced == ["file", "folder"] * 2


@pytest.mark.slow
def test_a_small_file_that_asks_for_very_many_runs_is_refused_before_they_are_made(tmp_path):
    lists = "\n".join(
        f"{key} = {list(range(1, 12))}" for key in ("seed", "k", "blocks", "heads", "epochs", "width")
    )
    file = tmp_path / "many.toml"
    file.write_text(f'task = "parity"\n[grid]\n{lists}\n')
    with pytest.raises(InputError, match="asks for more than 100,000 runs"):
        read_settings(file)
    nested = ", ".join(f"{key} = {list(range(1, 40))}" for key in ("k", "heads", "blocks", "width"))
    file.write_text(f'task = "parity"\n[grid]\nattention = [{{ attention = "topk", {nested} }}]\n')
    with pytest.raises(InputError, match="asks for more than 100,000 runs"):
        read_settings(file)
