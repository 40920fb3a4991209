"""What is not to be read: pipes, devices, what is too large, too deep, or damaged where torch overlooks it."""

import os
import pickle
import zipfile

import pytest
import torch

from semdiag_files import InputError, files
from semdiag_models.checkpoint import Checkpoint, read_checkpoint, read_plain, write_checkpoint
from semdiag_models.model import Encoder
from semdiag_models.sweep import read_settings
from semdiag_models.text import read_lines


@pytest.fixture
def path(tmp_path, tiny_model, tiny_training):
    state = Encoder(tiny_model()).state_dict()
    write_checkpoint(tmp_path / "last.pt", Checkpoint(tiny_model(), tiny_training(), state, 0, {}))
    return tmp_path / "last.pt"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("read", [read_checkpoint, read_settings, read_lines, files.read_json])
def test_pipes_and_devices_are_refused_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", type(tmp_path)("/dev/zero")):
        with pytest.raises(InputError, match="is no regular file, but a pipe, a device or a socket"):
            read(odd)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("target", ["/proc/kmsg", "/proc/self/status", "/proc/self/mem"])
def test_what_the_system_makes_up_is_no_file_of_the_users(tmp_path, target):
    """Some of it never ends, and looks like an empty regular file."""
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(InputError, match=r"is no regular file|permission denied"):
        files.open_file(tmp_path / "link")
    (tmp_path / "empty").touch()
    files.open_file(tmp_path / "empty").close()


def test_a_file_that_is_too_large_is_refused_unread(tmp_path):
    with (tmp_path / "endless.toml").open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no place on the disk
    for read in (read_settings, read_lines, read_checkpoint, files.read_json):
        with pytest.raises(InputError, match="has 1,099,511,627,776 bytes; files of its kind"):
            read(tmp_path / "endless.toml")


def test_memory_that_is_not_there_is_not_asked_for(path, monkeypatch):
    """Positions are not stored: half a megabyte may declare gigabytes of them."""
    content = torch.load(path, weights_only=True)
    content["config"]["model"]["length"] = 60_000
    torch.save(content, path)
    assert read_checkpoint(path).model.length == 60_000
    monkeypatch.setattr(files, "_memory", lambda: 2**24)
    with pytest.raises(
        InputError, match=r"declares a model that would take .* GiB of memory, more than a quarter"
    ):
        read_checkpoint(path)


def test_compressed_members_are_refused(path):
    packed = path.with_name("packed.pt")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for member in whole.infolist():
            file.writestr(member.filename, whole.read(member))
    with pytest.raises(InputError, match=r"compressed members, which torch\.save never writes"):
        read_checkpoint(packed)


def test_older_files_of_torch_are_refused_with_the_way_out(path):
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(
        InputError, match=r"can be saved again: torch\.save\(torch\.load\(OLD, weights_only=True\), NEW\)"
    ):
        read_plain(path)


def rewritten(path, change):
    """The archive with its pickle changed, whole otherwise."""
    with zipfile.ZipFile(path) as archive:
        members = [(m.filename, archive.read(m)) for m in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)


@pytest.mark.parametrize(
    "pickled",
    [b"\x80\x02" + b"]" * 60 + b"a" * 59 + b".", b"\x80\x02K\x00" + b"\x85" * 200_000 + b"."],
    ids=["lists", "tuples"],
)
def test_deep_nesting_does_not_reach_torch(path, monkeypatch, pickled):
    rewritten(path, lambda content: pickled)
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(InputError, match="containers that are nested too deeply"):
        read_plain(path)


def test_a_storage_larger_than_its_member_does_not_reach_torch(path, monkeypatch):
    torch.save({"a": torch.zeros(77)}, path)
    rewritten(path, lambda content: content.replace(b"K\x4dtq", b"K\x4etq"))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(InputError, match="a storage that is larger than what is stored of it"):
        read_plain(path)


def test_weights_without_their_checksum_are_refused_in_our_format_and_warned_of_in_others(path):
    def flip(file):
        content = bytearray(file.read_bytes())
        with zipfile.ZipFile(file) as archive:
            member = next(m for m in archive.infolist() if m.filename.endswith("data/0"))
        content[member.header_offset + 30 + len(member.filename) + 64 + 20] ^= 1
        file.write_bytes(content)

    flip(path)
    with pytest.raises(InputError, match=r"is damaged: the checksum of '.*data/0' is wrong"):
        read_checkpoint(path)
    with pytest.raises(InputError, match=r"is damaged: the checksum of '.*data/0' is wrong"):
        read_plain(path)
    torch.save({"weight": torch.randn(500)}, path)
    flip(path)
    with pytest.warns(UserWarning, match=r"the checksum of '.*data/0' is wrong"):
        assert len(read_plain(path)["weight"]) == 500


def test_nesting_and_digits_of_a_toml_file_are_limited(tmp_path):
    file = tmp_path / "a.toml"
    for text in ("a = " + "[" * 5000 + "]" * 5000, "a = " + "[" * 60 + "]" * 60, "seed = " + "9" * 5000):
        file.write_text(text)
        with pytest.raises(InputError, match=r"a\.toml cannot be read"):
            read_settings(file)


def test_legitimate_pickles_pass(path):
    deep = {"a": [{"b": (1, [2, {"c": torch.zeros(2), "d": {1, 2}}])}] * 3}
    torch.save(deep, path)
    assert read_plain(path)["a"][0]["b"][1][1]["c"].shape == (2,)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        torch.save({"a": torch.zeros(2), "b": [1.5, "x", None, True]}, path, pickle_protocol=protocol)


@pytest.mark.parametrize("text", ['{"a": [{"b": %s}]}', "[-%s]", "%s"])
@pytest.mark.parametrize("digits", [310, 400, 5000])
def test_a_number_beyond_what_floating_point_holds_is_refused(tmp_path, text, digits):
    path = tmp_path / "record.json"
    path.write_text(text % ("9" * digits))
    with pytest.raises(InputError, match="cannot be read as JSON"):
        files.read_json(path)
    table = tmp_path / "plan.toml"
    table.write_text("a = " + "9" * digits)
    with pytest.raises(InputError, match="cannot be read"):
        files.read_toml(table)
