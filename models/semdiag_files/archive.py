"""Inspection of a file of torch.save before torch reads it: its zip members, and the objects of its pickle."""

import io
import pickletools
import zipfile
from typing import Any, BinaryIO

from semdiag_files.errors import InputError

_LARGEST_PICKLE = 64 * 2**20  # bytes; tensors are stored beside it
_LONGEST_NAME = 300  # largest number of characters of a member's or a global's name
_DEEPEST = 50  # largest number of levels of nested containers
_SAVE_AGAIN = "A file of torch before 1.6 can be saved again: torch.save(torch.load(OLD, weights_only=True), NEW)"
_WIDTHS = {  # bytes per element, by the start of the storage's class name
    "ComplexDouble": 16, "ComplexFloat": 8, "Double": 8, "Long": 8, "BFloat16": 2, "Float": 4, "Int": 4, "Half": 2,
    "Short": 2,
}  # fmt: skip


def damaged(reason: str) -> str:
    """Return the message for a file that is not read; it goes on after the file's path."""
    return f"is not a checkpoint, or it is truncated ({reason})."


def holding_code(code: str) -> str:
    """Return the message for a file that contains code."""
    return (
        f"refused: it holds the code object {code[:120]}, and checkpoints are read as data only. Save a state "
        "dict of tensors instead; for a model of your own name a function that builds it: package.module:function."
    )


def check_archive(file: BinaryIO) -> str | None:
    """Refuse what breaks torch's reader; return the first member with a wrong checksum."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            sizes = {member.filename.lower().rpartition("/")[2]: member.file_size for member in members}
            if any(member.compress_type for member in members):
                raise InputError(damaged("compressed members, which torch.save never writes"))
            if any(len(member.filename) > _LONGEST_NAME for member in members):
                raise InputError(damaged("names of members that are too long"))
            if sum(member.file_size for member in members) > file.seek(0, io.SEEK_END):
                raise InputError(damaged("members that are larger than the file"))
            wrong = archive.testzip()
            for member in members:
                if member.filename.lower().endswith("data.pkl"):
                    if member.file_size > _LARGEST_PICKLE:
                        raise InputError(damaged("a pickle that is too large"))
                    _check_pickle(_content(file, member), sizes)
    except InputError:
        raise
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, RuntimeError, EOFError) as error:
        if code := code_in(file):
            raise InputError(holding_code(code)) from None
        raise InputError(damaged(f"no zip archive as torch.save writes it. {_SAVE_AGAIN}")) from error
    file.seek(0)
    return wrong


def _content(file: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a stored member, whatever their checksum."""
    file.seek(member.header_offset + 26)
    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    file.seek(member.header_offset + 30 + name + extra)
    return file.read(member.file_size)


def _check_pickle(data: bytes, sizes: dict[str, int]) -> None:
    """Follow a pickle without building anything."""
    stack = list[tuple[int, Any]]()
    marks = list[int]()
    memo = dict[Any, tuple[int, Any]]()
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            name = opcode.name
            if name == "MARK":
                marks.append(len(stack))
            elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo[argument])
            elif name in ("GLOBAL", "INST") and len(str(argument)) > _LONGEST_NAME:
                raise InputError(
                    holding_code(".".join(str(argument).split()))
                )  # torch's search of its message is quadratic
            elif name not in ("PROTO", "FRAME"):
                _step(opcode, argument, stack, marks, sizes)
    except InputError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(damaged("a damaged pickle")) from error


def _step(opcode: Any, argument: Any, stack: list[Any], marks: list[int], sizes: dict[str, int]) -> None:
    before = [kind.name for kind in opcode.stack_before]
    first = marks.pop() - before.index("mark") if "mark" in before else len(stack) - len(before)
    if first < 0:
        raise IndexError
    taken = stack[first:]
    del stack[first:]
    if opcode.name == "BINPERSID":  # torch trusts the pickle's size of a storage, and would read beyond
        _check_storage(taken[0][1], sizes)
    changed = opcode.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
    inner = max((depth for depth, _ in taken[changed:]), default=0)
    depth = max(taken[0][0], inner + 1) if changed else inner + 1 if taken else 0
    if depth > _DEEPEST:
        raise InputError(damaged("containers that are nested too deeply"))
    value = tuple(value for _, value in taken) if opcode.name.startswith("TUPLE") else argument
    for _ in opcode.stack_after:
        stack.append((depth, value))


def _check_storage(storage: Any, sizes: dict[str, int]) -> None:
    """Refuse a storage that is larger than its member."""
    _, kind, key, _, elements = storage
    width = next((n for word, n in _WIDTHS.items() if word in str(kind)), 1)
    if not isinstance(elements, int) or not 0 <= elements * width <= sizes[str(key).lower()]:
        raise InputError(damaged("a storage that is larger than what is stored of it"))


def code_in(file: BinaryIO) -> str | None:
    """Return the first global that is not torch's, in bare or archived pickles of any protocol; else None."""
    try:
        file.seek(0)
        data = file.read(2**20)
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                member = next(m for m in archive.infolist() if m.filename.lower().endswith("data.pkl"))
                data = _content(file, member)
        stream = io.BytesIO(data)
        strings = list[str]()
        while True:
            for opcode, argument, _ in pickletools.genops(stream):
                if isinstance(argument, str):
                    strings.append(argument)  # STACK_GLOBAL follows those of module and name
                words = strings[-2:] if opcode.name == "STACK_GLOBAL" else str(argument).split(" ")
                name = ".".join(words) if opcode.name in ("GLOBAL", "STACK_GLOBAL") else "torch."
                if not name.startswith(("torch.", "collections.OrderedDict")):
                    return " ".join(name.split())[:120]
    except Exception:  # end of the pickles, or no pickle at all
        return None
