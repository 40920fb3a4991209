"""Arrays in .npz, .safetensors and .parquet files."""

import math
import zipfile
from collections.abc import Collection
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing.inputs import array_tensor, check_header, check_member
from semdiag.capturing.pretrained import read_header
from semdiag_files import InputError, check_packed, open_file, require_memory

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip


_CONVERT = {
    ".pt": "found = torch.load(FILE, weights_only=True); numpy.savez(NEW, indices=found[NAME].numpy(), "
    "scores=found[OTHER].float().numpy())",
    ".npy": "import numpy; numpy.savez(NEW, indices=numpy.load(FILE), scores=numpy.load(OTHER))",
}


def array_names(path: Path) -> list[str]:
    """Return the names of all arrays of a file; one that :func:`read_arrays` cannot read is refused."""
    read_arrays(path, [])
    with open_file(path) as file:
        if path.suffix == ".npz":
            return [str(name) for name in np.load(file, allow_pickle=False).files]
        if path.suffix == ".safetensors":
            return [name for name in read_header(path, file) if name != "__metadata__"]
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pa.BufferReader(file.read()) as stored:
            return [str(name) for name in pq.ParquetFile(stored).schema_arrow.names]


def read_arrays(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read named arrays from a file."""
    readers = {".npz": _npz, ".safetensors": _safetensors, ".parquet": _parquet}
    if path.suffix in _CONVERT:
        raise InputError(
            f"Arrays must be in a .npz file. Two lines write one: {_CONVERT[path.suffix]}. Got {path.name}."
        )
    if path.suffix not in readers:
        raise InputError(f"Arrays must be in .npz, .safetensors or .parquet files. Got {path.name}.")
    try:
        return readers[path.suffix](path, names)
    except InputError:
        raise
    except Exception as error:  # on damaged files readers raise anything
        reason = str(error).split("\n", 1)[0][:120] or type(error).__name__
        raise InputError(f"{path} cannot be read as arrays of numbers ({reason}).") from None


def _npz(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    with open_file(path) as file:
        if not zipfile.is_zipfile(file):
            raise InputError(
                f"{path} is not an archive of arrays. Write one with: numpy.savez(FILE, indices=ARRAY)."
            )
        file.seek(0)
        content = np.load(file, allow_pickle=False)
        stored = content.zip.namelist()
        chosen = [name for name in content.files if name in names]
        members = {name: content.zip.getinfo(name if name in stored else f"{name}.npy") for name in chosen}
        require_memory(sum(member.file_size for member in members.values()), f"{path}, unpacked,")
        arrays = {}
        for name, member in members.items():
            check_member(path, member)
            with content.zip.open(member) as array:
                check_header(path, array)
            arrays[name] = array_tensor(path, content[name])
        return arrays


def _safetensors(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    with open_file(path) as file:
        header = read_header(path, file)
        offset = file.tell()
        return {
            name: _stored(path, file, offset, header[name])
            for name in names
            if isinstance(header, dict) and name in header and name != "__metadata__"
        }


def _stored(path: Path, file: BufferedReader, offset: int, entry: Any) -> Tensor:
    kind = _TYPES.get(entry["dtype"])
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if kind is None:
        raise InputError(f"{path} holds numbers of type {str(entry['dtype'])[:20]}; known: {', '.join(_TYPES)}.")
    sizes_are_valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    if not sizes_are_valid or len(shape) > 16 or end - begin != math.prod(shape) * kind.itemsize:
        raise InputError(f"{path} is damaged: a tensor's size does not match its shape.")
    require_memory(end - begin, f"{path}: a tensor of shape {tuple(shape)}")
    file.seek(offset + begin)
    data = bytearray(file.read(end - begin))
    if len(data) != end - begin:
        raise InputError(f"{path} is damaged: it ends inside a tensor.")
    return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


def _parquet(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    import pyarrow as pa  # slow to import; not needed to measure one model
    import pyarrow.parquet as pq

    # Read from memory: on a damaged file, threads that wait for Python file reads would end the process.
    with open_file(path) as packed, pa.BufferReader(packed.read()) as file:
        stored_table = pq.ParquetFile(file)
        metadata = stored_table.metadata
        read_columns = [name for name in stored_table.schema_arrow.names if name in names]
        places = [
            c for c in range(metadata.num_columns) if metadata.schema.column(c).path.split(".")[0] in read_columns
        ]
        columns = [metadata.schema.column(c) for c in places]
        texts = [column.path for column in columns if "BYTE_ARRAY" in column.physical_type]
        if texts:
            raise InputError(f"{path}: the column {texts[0]} holds texts, not numbers.")
        size = 0
        stored = 0
        for group in range(metadata.num_row_groups):
            # Reading a row of a damaged column raises an exception; reading its metadata ends the process.
            next(
                stored_table.iter_batches(
                    batch_size=1, row_groups=[group], columns=read_columns, use_threads=False
                ),
                None,
            )
            parts = [metadata.row_group(group).column(c) for c in places]
            stored += sum(part.total_uncompressed_size for part in parts)
            size += sum(max(16 * part.num_values, part.total_uncompressed_size) for part in parts)
        check_packed(path, stored, file.size())
        require_memory(max(size, 16 * metadata.num_rows * len(places)), f"{path}, unpacked,")
        table = pq.read_table(file, columns=read_columns).to_pandas()
    return {name: array_tensor(path, _stacked(path, table[name])) for name in read_columns}


def _stacked(path: Path, column: Any) -> "np.ndarray[Any, Any]":
    """Convert a column of numbers, or of lists of equal length, to an array."""
    values = column.to_numpy() if hasattr(column, "to_numpy") else np.asarray(column)
    if values.dtype != object:
        return np.ascontiguousarray(values)
    rows = [_stacked(path, row) for row in values]
    if not rows or any(row.shape != rows[0].shape or row.dtype != rows[0].dtype for row in rows):
        name = getattr(column, "name", "a list")
        raise InputError(
            f"{path}: the rows of {name} are lists of different lengths. Fill the shorter ones with -1."
        )
    return np.stack(rows)
