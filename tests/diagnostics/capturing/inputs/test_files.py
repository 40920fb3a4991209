"""Token ids from files: what is read, and what is refused and why."""

import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from semdiag.capturing.inputs import read_batches, read_inputs
from semdiag_files import InputError, files

TOKENS = [[0, 1, 1], [1, 0, 2]]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint16])
def test_an_array_is_read(tmp_path, dtype):
    np.save(tmp_path / "tokens.npy", np.array(TOKENS, dtype))
    found = read_inputs(tmp_path / "tokens.npy")
    assert (found.tolist(), found.dtype) == (TOKENS, torch.int64)


@pytest.mark.parametrize("dtype", [">i8", ">u2", "<i4", "<u8", ">u8"])
def test_an_array_of_either_byte_order_is_read(tmp_path, dtype):
    np.save(tmp_path / "tokens.npy", np.array(TOKENS, dtype))
    np.savez(tmp_path / "tokens.npz", np.array(TOKENS, dtype))
    assert read_inputs(tmp_path / "tokens.npy").tolist() == read_inputs(tmp_path / "tokens.npz").tolist() == TOKENS


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.array([[1, 2**63 + 5]], "u8"),
            r"holds the token id 9223372036854775813; token ids must be below 2\^63\.$",
        ),
        (np.array([["a"]], "S1"), r"numbers \(it holds \|S1\)\.$"),
        (
            np.array([[1]], np.longdouble),
            r"numbers \(it holds float\w+\)\.$",
        ),
    ],
)
def test_numbers_that_no_tensor_of_token_ids_holds_are_refused_in_whole_sentences(tmp_path, array, message):
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(InputError, match=message):
        read_inputs(tmp_path / "tokens.npy")


def test_an_archive_without_arrays_is_refused_with_what_writes_one(tmp_path):
    np.savez(tmp_path / "none.npz")
    with pytest.raises(InputError, match=r"none\.npz holds no array\. Write one with: numpy\.savez"):
        read_inputs(tmp_path / "none.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_of_an_archive_the_array_tokens_or_the_only_one_is_read(tmp_path, save):
    save(tmp_path / "named.npz", labels=[0, 1], tokens=TOKENS)
    save(tmp_path / "only.npz", anything=TOKENS)
    assert read_inputs(tmp_path / "named.npz").tolist() == read_inputs(tmp_path / "only.npz").tolist() == TOKENS


@pytest.mark.parametrize("content", [torch.tensor(TOKENS), {"tokens": torch.tensor(TOKENS), "labels": [0, 1]}])
def test_a_tensor_or_a_dictionary_with_tokens_is_read(tmp_path, content):
    torch.save(content, tmp_path / "tokens.pt")
    assert read_inputs(tmp_path / "tokens.pt").tolist() == TOKENS


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: {"tokens": t}, lambda t: [{"ids": t}], lambda t: [(t, t)]]
)
def test_a_small_file_of_expanded_inputs_is_refused_before_anything_is_made_of_it(tmp_path, wrap):
    path = tmp_path / "tokens.pt"
    torch.save(wrap(torch.zeros(1, 1, dtype=torch.int64).expand(10**12, 40)), path)
    with pytest.raises(InputError, match=r"tokens.pt: a tensor of shape \(1000000000000, 40\) would take .* GiB"):
        read_batches(path, None, 10)
    torch.save(wrap(torch.zeros(1, 4, dtype=torch.int64).expand(2, 4)), path)  # as position ids often are
    assert len(read_batches(path, None, 10)) == 1
    torch.save(wrap(torch.tensor(TOKENS * 2).T[:2]), path)  # a view of all its numbers, in another order
    assert len(read_batches(path, None, 10)) == 1


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.npy does not exist\.$"):
        read_inputs(tmp_path / "nowhere.npy")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(InputError, match=r"folder\.npy is a folder, not a file\.$"):
        read_inputs(tmp_path / "folder.npy")


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "tokens.csv").write_text("0,1\n")
    with pytest.raises(InputError, match=r"^Inputs come as \.npy, \.npz or \.pt .* Got tokens\.csv\. A table "):
        read_inputs(tmp_path / "tokens.csv")


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (np.array(TOKENS, float), "torch.float64 (2, 3)"),
        (np.array(TOKENS, complex), "torch.complex128 (2, 3)"),
        (np.array(TOKENS, bool), "torch.bool (2, 3)"),
        (np.array(TOKENS[0]), "torch.int64 (3,)"),
        (np.array(3), "torch.int64 ()"),
        (np.zeros((0, 3), int), "torch.int64 (0, 3)"),
        (np.zeros((3, 0), int), "torch.int64 (3, 0)"),
        (np.zeros((2, 3, 4), int), "torch.int64 (2, 3, 4)"),
    ],
)
@pytest.mark.parametrize("suffix", ["npy", "npz", "pt"])
def test_what_is_not_whole_numbers_in_two_axes_is_refused(tmp_path, content, got, suffix):
    path = tmp_path / f"odd.{suffix}"
    {"npy": np.save, "npz": np.savez, "pt": lambda p, a: torch.save(torch.from_numpy(a), p)}[suffix](path, content)
    with pytest.raises(InputError) as refused:
        read_inputs(path)
    assert str(refused.value) == f"{path} must hold whole token ids of shape (N, L), at least one. Got {got}."


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ({"labels": torch.zeros(2)}, "NoneType"),
        (TOKENS, "list"),
    ],
)
def test_other_content_of_a_pt_file_is_refused(tmp_path, content, got):
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(InputError) as refused:
        read_inputs(tmp_path / "odd.pt")
    assert str(refused.value).endswith(f"Got {got}.")


def test_an_archive_with_several_arrays_must_name_one_of_them_tokens(tmp_path):
    np.savez(tmp_path / "two.npz", first=TOKENS, second=TOKENS)
    with pytest.raises(InputError, match=r"two\.npz holds first, second: name one of them tokens\.$"):
        read_inputs(tmp_path / "two.npz")


class Malicious:
    """Unpickling it would make a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("suffix", ["npy", "npz", "pt"])
def test_code_is_refused_and_not_run(tmp_path, suffix):
    path, code = tmp_path / f"code.{suffix}", Malicious(tmp_path / "made")
    objects = np.array([[code]], dtype=object)
    {"npy": np.save, "npz": np.savez, "pt": lambda p, a: torch.save(code, p)}[suffix](path, objects)
    with pytest.raises(InputError, match=r"code\.(npy|npz) cannot be read|code\.pt refused: .* (posix|nt)\.mkdir"):
        read_inputs(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_bare_pickle_is_refused_and_not_run(tmp_path, suffix):
    path = tmp_path / f"code.{suffix}"
    path.write_bytes(pickle.dumps(Malicious(tmp_path / "made")))
    with pytest.raises(InputError, match="cannot be read as an array of numbers"):
        read_inputs(path)
    assert not (tmp_path / "made").exists()


def test_text_is_no_array_of_numbers(tmp_path):
    np.save(tmp_path / "text.npy", np.array([["a", "b"]]))
    with pytest.raises(InputError, match=r"text\.npy cannot be read as an array of numbers \("):
        read_inputs(tmp_path / "text.npy")


@pytest.mark.parametrize("save", [np.save, np.savez, np.savez_compressed])
def test_a_truncated_file_is_refused_at_any_length(tmp_path, save):
    path = tmp_path / ("whole.npy" if save is np.save else "whole.npz")
    save(path, np.random.default_rng(0).integers(0, 9, (50, 20)))
    content = path.read_bytes()
    for share in (0, 0.01, 0.1, 0.5, 0.99):
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(InputError, match=r"cannot be read as an array of numbers \(.+\)\.$") as refused:
            read_inputs(path)
        assert "\n" not in str(refused.value)


def test_a_header_that_promises_too_much_is_refused(tmp_path):
    np.save(tmp_path / "huge.npy", np.zeros((10, 10), int))
    content = (tmp_path / "huge.npy").read_bytes()
    (tmp_path / "huge.npy").write_bytes(content.replace(b"(10, 10), }      ", b"(10**9, 10**9), }"))
    with pytest.raises(InputError, match="cannot be read"):
        read_inputs(tmp_path / "huge.npy")
    (tmp_path / "huge.npy").write_bytes(content.replace(b"(10, 10), }            ", b"(99999999, 99999999), }"))
    with pytest.raises(InputError, match=r"an array of shape \(99999999, 99999999\) would take .* GiB of memory"):
        read_inputs(tmp_path / "huge.npy")
    np.savez(tmp_path / "huge.npz", tokens=np.zeros((10, 10), int))
    content = (tmp_path / "huge.npy").read_bytes()
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("tokens.npy", content)
    with pytest.raises(InputError, match=r"an array of shape \(99999999, 99999999\) would take .* GiB of memory"):
        read_inputs(tmp_path / "huge.npz")


def test_an_archive_that_unpacks_to_far_more_than_its_file_is_refused(tmp_path, monkeypatch):
    """Zeros deflate to a thousandth of their size; ids drawn from a thousand, of 64 bits, to a sixth at best."""
    monkeypatch.setattr(files, "_LARGEST_PACKED", 2**20)
    real = np.random.default_rng(0).integers(0, 1000, (2000, 100))
    np.savez_compressed(tmp_path / "real.npz", tokens=real, unused=np.zeros((2000, 100), int))
    assert read_inputs(tmp_path / "real.npz").tolist() == real.tolist()
    np.savez_compressed(tmp_path / "bomb.npz", tokens=np.zeros((2000, 100), int))
    with pytest.raises(InputError, match=r"bomb\.npz unpacks to 2 MiB from 0\.00\d+ MiB: it is almost"):
        read_inputs(tmp_path / "bomb.npz")
    np.savez_compressed(tmp_path / "small.npz", tokens=np.zeros((100, 100), int))
    assert read_inputs(tmp_path / "small.npz").shape == (100, 100)


@pytest.mark.parametrize("suffix", ["npy", "npz", "pt"])
def test_small_numbers_that_do_not_fit_as_token_ids_are_refused(tmp_path, monkeypatch, suffix):
    """A number of 8 bits becomes one of 64."""
    path, ids = tmp_path / f"ids.{suffix}", np.zeros((2**10, 2**10), np.int8)
    {"npy": np.save, "npz": np.savez, "pt": lambda p, a: torch.save(torch.from_numpy(a), p)}[suffix](path, ids)
    assert read_inputs(path).dtype == torch.int64
    monkeypatch.setattr(files, "_memory", lambda: 4 * 2**22)  # a quarter holds the file, and not the ids
    with pytest.raises(InputError, match=r"as token ids, would take"):
        read_inputs(path)


def test_a_damaged_member_of_an_archive_is_refused(tmp_path):
    path = tmp_path / "damaged.npz"
    np.savez_compressed(path, tokens=np.random.default_rng(0).integers(0, 9, (50, 20)))
    with zipfile.ZipFile(path) as archive:
        start = archive.infolist()[0].header_offset + 80
    content = bytearray(path.read_bytes())
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"damaged\.npz cannot be read as an array of numbers"):
        read_inputs(path)
