"""What trainer and toolkit share: errors, text safe to show, and the only way in which files are opened."""

from semdiag_files.errors import InputError, unknown_name
from semdiag_files.files import (
    LARGEST_TEXT,
    MEBIBYTE,
    check_packed,
    layers,
    memory_share,
    open_file,
    read_bytes,
    read_json,
    read_toml,
    require_memory,
    write_bytes,
    write_csv,
    write_text,
)
from semdiag_files.locks import RunLock
from semdiag_files.text import counted, csv_cell, from_csv_cell, visible, visible_json

__all__ = [
    # errors
    "InputError", "unknown_name",
    # text
    "counted", "csv_cell", "from_csv_cell", "visible", "visible_json",
    # files
    "LARGEST_TEXT", "MEBIBYTE", "RunLock", "check_packed", "layers", "memory_share", "open_file", "read_bytes",
    "read_json", "read_toml", "require_memory", "write_bytes", "write_csv", "write_text",
]  # fmt: skip
