"""Named arrays in files: what is read, and what hostile files are refused with."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag.selections.arrays import read_arrays
from semdiag.selections.check import check_file
from semdiag.selections.files import chosen_weights, read_selection
from semdiag_files import InputError, files

NAMES = ("indices", "scores")
INDICES = [[[0, 1], [2, -1]], [[3, 4], [5, 6]]]


def safetensors(path, header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_every_kind_of_file_holds_the_same(tmp_path):
    scores = np.arange(16, dtype=np.float32).reshape(2, 2, 4)
    np.savez(tmp_path / "a.npz", indices=np.array(INDICES, ">i4"), scores=scores, other=np.array(["x"]))
    table = pd.DataFrame({"indices": INDICES, "scores": [row.tolist() for row in scores], "text": ["a", "b"]})
    table.to_parquet(tmp_path / "a.parquet")
    halves = torch.from_numpy(scores).bfloat16().view(torch.int16).numpy()
    data = np.array(INDICES, "<i2").tobytes() + halves.tobytes()
    header = {
        "__metadata__": {"a": "b"},
        "indices": {"dtype": "I16", "shape": [2, 2, 2], "data_offsets": [0, 16]},
        "scores": {"dtype": "BF16", "shape": [2, 2, 4], "data_offsets": [16, 48]},
    }
    safetensors(tmp_path / "a.safetensors", header, data)
    for kind in ("npz", "parquet", "safetensors"):
        found = read_arrays(tmp_path / f"a.{kind}", NAMES)
        assert set(found) == set(NAMES), kind
        assert found["indices"].tolist() == INDICES
        assert found["scores"].float().tolist() == scores.tolist()
    assert found["scores"].dtype == torch.bfloat16


def test_what_the_library_writes_is_read(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    tensors = {"indices": torch.tensor(INDICES), "scores": torch.rand(3, 5).to(torch.float8_e4m3fn)}
    library.save_file(tensors, tmp_path / "a.safetensors")
    found = read_arrays(tmp_path / "a.safetensors", NAMES)
    assert torch.equal(found["indices"], tensors["indices"])
    assert torch.equal(found["scores"].float(), tensors["scores"].float())


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("made",)


def entry(**changed):
    return {"indices": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8], **changed}}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (entry(shape=[2]), b"\0" * 8, "size does not match its shape"),
        (entry(shape=[10**30], data_offsets=[0, 8 * 10**30]), b"", "GiB of memory"),
        (entry(shape=[-1, -1]), b"\0" * 8, "does not match its shape"),
        (entry(shape=[1.0]), b"\0" * 8, "does not match its shape"),
        (entry(shape=[True]), b"\0" * 8, "does not match its shape"),
        (entry(shape=[1] * 17), b"\0" * 8, "does not match its shape"),
        (entry(data_offsets=[8, 0]), b"\0" * 8, "does not match its shape"),
        (entry(), b"\0" * 7, "ends inside a tensor"),
        (entry(dtype="OBJECT"), b"\0" * 8, "numbers of type OBJECT"),
        (entry(dtype=["I64"]), b"\0" * 8, "cannot be read"),
        (entry(data_offsets=[0]), b"\0" * 8, "cannot be read"),
        ({"indices": 3}, b"", "cannot be read"),
        (b"[" * 100_000, b"", "cannot be read"),
        (b"no json", b"", "cannot be read"),
    ],
)
def test_hostile_safetensors_are_refused(tmp_path, header, data, said):
    path = safetensors(tmp_path / "a.safetensors", header, data)
    with pytest.raises(InputError, match=said) as refused:
        read_arrays(path, NAMES)
    assert "\n" not in str(refused.value)


def test_a_header_of_a_terabyte_is_not_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(InputError, match="its header would have 1,099,511,627,776 bytes"):
        read_arrays(path, NAMES)


def array(content, header=None):
    """The bytes of an .npy; with another header if it is given."""
    file = io.BytesIO()
    np.save(file, content, allow_pickle=True)
    if header is None:
        return file.getvalue()
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (array(np.array([Harmful()], object)), "cannot be read as arrays"),
        (array(np.array(["a"])), "cannot be read"),
        (array(None, "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }"), "GiB of memory"),
        (b"no array", "cannot be read"),
    ],
)
def test_hostile_archives_are_refused(tmp_path, monkeypatch, member, said):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("a.npz", "w") as archive:
        archive.writestr("indices.npy", member)
    with pytest.raises(InputError, match=said):
        read_arrays(tmp_path / "a.npz", NAMES)
    assert not (tmp_path / "made").exists()


def test_an_archive_of_repetitions_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", indices=np.zeros((1000, 1000), np.int64))
    monkeypatch.setattr(files, "_memory", lambda: 10**6)
    with pytest.raises(InputError, match="unpacked"):
        read_arrays(tmp_path / "a.npz", NAMES)


@pytest.mark.parametrize("content", [pickle.dumps(Harmful()), b"", b"PK\x03\x04", array(np.zeros(3))])
@pytest.mark.parametrize("kind", ["npz", "parquet", "safetensors"])
def test_other_content_is_refused(tmp_path, monkeypatch, content, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_arrays(path, NAMES)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([[0, 1], [2]], "lists of different lengths"),
        ([[[0, 1]], [[2], [3]]], "lists of different lengths"),
        ([["a"], ["b"]], "holds texts, not numbers"),
        ([None, [1]], "cannot be read"),
    ],
)
def test_columns_that_are_no_array_are_refused(tmp_path, column, said):
    pd.DataFrame({"indices": column}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=said):
        read_arrays(tmp_path / "a.parquet", NAMES)


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"Arrays must be in \.npz, \.safetensors or \.parquet files\. Got a\.csv"
    ):
        read_arrays(tmp_path / "a.csv", NAMES)


_DAMAGE = """
import sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from semdiag.selections.arrays import read_arrays
from semdiag.selections.check import check_file
from semdiag.selections.files import chosen_weights, read_selection
from semdiag_files import InputError
path = Path(sys.argv[1])
pq.write_table(pa.table({"indices": [[1, 2], [2, 3]], "scores": [[0.5, 1.0, 2.0]] * 2}), path)
good, read = path.read_bytes(), 0
for place in range(len(good) - 8 - int.from_bytes(good[-8:-4], "little"), len(good) - 8):
    for change in (10, 1):
        damaged = bytearray(good)
        damaged[place] ^= change
        path.write_bytes(damaged)
        try:
            read += len(read_arrays(path, ("indices", "scores")))
        except InputError:
            pass
print(read)
"""


@pytest.mark.slow
def test_no_damaged_footer_ends_the_process(tmp_path):
    """Arrow ends the process where it is asked for the description of a column that contradicts itself."""
    words = [sys.executable, "-W", "ignore", "-c", _DAMAGE, str(tmp_path / "damaged.parquet")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10  # harmless changes


CHOSEN = np.array([[0, 1], [0, 2], [1, 2]])
QUERIES = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"cu_seqlens": np.array(3)}, "bounds of the same sequences"),
        ({"cu_seqlens": np.array([0, 3j])}, "whole numbers. Got complex128"),
        ({"cu_seqlens": np.array([0.0, 3.0])}, "whole numbers. Got float64"),
        ({"cu_seqlen_ks": np.zeros(3, int), "cu_seqlen_ke": np.full(4, 4)}, r"one shape. Got \(3,\) and \(4,\)"),
        ({"cu_seqlen_ke": np.ones(3, bool)}, "whole numbers. Got bool"),
        ({"q": QUERIES, "k": QUERIES, "scale": np.ones(2)}, r"one finite number. Got float64 of \(2,\)"),
        ({"q": QUERIES, "k": QUERIES, "scale": np.array([])}, "one finite number"),
        ({"q": QUERIES, "k": QUERIES, "scale": np.array(1j)}, "one finite number. Got complex128"),
        ({"q": QUERIES, "k": QUERIES, "scale": np.array(np.nan)}, "one finite number"),
        ({"q": QUERIES.astype(np.complex64), "k": QUERIES}, "q must be floating-point numbers. Got complex64"),
        ({"q": QUERIES, "k": CHOSEN}, "k must be floating-point numbers. Got int64"),
        ({"scores": QUERIES, "error": np.array(1j)}, "error must be floating-point numbers. Got complex128"),
    ],
)
def test_arrays_of_another_kind_or_shape_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", indices=CHOSEN, **arrays)
    with pytest.raises(InputError, match=message):
        check_file(read_selection(tmp_path / "a.npz"), False, "float32", None)


@pytest.mark.parametrize("kind", ["u2", "u4", "u8", "i4"])
def test_bounds_of_every_whole_type_are_the_same(tmp_path, kind):
    bounds = {"cu_seqlen_ks": np.zeros(3, kind), "cu_seqlen_ke": np.array([2, 3, 3], kind)}
    np.savez(tmp_path / "a.npz", indices=CHOSEN, **bounds)
    file = read_selection(tmp_path / "a.npz")
    assert file.lengths.tolist() == [2, 3, 3]
    assert check_file(file, False, "float32", None).faults == 0


def test_a_single_weight_without_dimensions_is_refused():
    with pytest.raises(InputError, match="one for each index"):
        chosen_weights(torch.tensor(0.5), torch.tensor([[1]]))
