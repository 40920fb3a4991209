"""How many small faults do the tests notice? Draws changes of one operator or number each, and runs the tests.

    python benchmarks/mutants.py diagnostics/semdiag/mathematics --draws 40
    python benchmarks/mutants.py diagnostics/semdiag/capturing diagnostics/semdiag/measuring --draws 40 --seed 1

A drawn change is made in a copy of the tree; the tests that mirror its file run until the first failure. What
survives is printed with its line: a test is missing there, or the change means nothing.

It is the measure for cuts of tests. ``--same-as OTHER`` draws only from what another checkout has, too, in the
same file; run in both checkouts with the same seed, it makes the same changes, and as many must be noticed.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMBINED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, object]]:
    """Yield the node, the field and the new value of each possible change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield node, "ops", [COMPARED[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BinOp) and type(node.op) in COMBINED and _counts(node):
            yield node, "op", COMBINED[type(node.op)]()
        elif isinstance(node, ast.BoolOp):
            yield node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "op", ast.UAdd()  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, "value", node.value + 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "value", not node.value


def _counts(node: ast.BinOp) -> bool:
    """Return whether no side is a text, None or a type, as in the unions of annotations."""
    sides = (node.left, node.right)
    return not any(isinstance(side, ast.JoinedStr | ast.Subscript) or getattr(side, "value", 0) is None or
                   isinstance(getattr(side, "value", 0), str) for side in sides)  # fmt: skip


def draw(files: list[Path], number: int, seed: int, other: Path | None) -> list[tuple[Path, str, int]]:
    """Draw places of changes: a file, a function or class in it, and the change's number therein."""
    places = []
    for file in files:
        theirs = definitions(other / file.relative_to(ROOT)) if other else None
        for name, node in definitions(file).items():
            if theirs is None or (name in theirs and code(theirs[name]) == code(node)):
                places += [(file, name, index) for index, _ in enumerate(changes(node))]
    return sorted(random.Random(seed).sample(places, min(number, len(places))))


def definitions(file: Path) -> dict[str, ast.AST]:
    """Return the functions and classes of a file by name."""
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def code(definition: ast.AST) -> str:
    """Return what a definition does, as text: without its docstrings."""
    copied = copy.deepcopy(definition)
    for node in ast.walk(copied):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(copied)


def changed(file: Path, name: str, index: int) -> tuple[str, int]:
    """Return the file's text after one change, and the line of the change."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inside = definitions(file)[name]
    node, field, value = list(changes(inside))[index]
    setattr(node, field, value)
    tree.body = [inside if getattr(old, "name", None) == name else old for old in tree.body]  # type: ignore[misc]
    return ast.unparse(tree), node.lineno  # type: ignore[attr-defined]


def tests_of(file: Path) -> list[Path]:
    """Return the tests named like a source file in the room that mirrors its own, then all that import it."""
    parts = [part for part in file.relative_to(ROOT).parts if part not in ("semdiag", "semdiag_models")]
    room = Path("tests", *parts[:-1])
    while not (ROOT / room).is_dir():
        room = room.parent
    named = [place for place in (room / f"test_{file.name}", room / file.stem) if (ROOT / place).exists()]
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")
    imports = re.compile(rf"from {module} import|from {module.rpartition('.')[0]} import .*\b{file.stem}\b")
    tests = [test.relative_to(ROOT) for test in sorted((ROOT / "tests").rglob("test_*.py"))]
    importing = [test for test in tests if imports.search((ROOT / test).read_text(encoding="utf-8"))]
    return [*named, *(test for test in importing if not {test, *test.parents} & {*named})] or [room]


def fail(tree: Path, tests: list[Path], marks: str, seconds: int) -> bool:
    """Return whether a test with these marks fails, or is not done after so many seconds."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree / "diagnostics"), str(tree / "models")]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = ["-m", "pytest", "-qx", "-n", "0", "-p", "no:cacheprovider", "-m", marks, *map(str, tests)]
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=tree, env=environment, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)  # 5: there are no such tests


def main() -> None:
    """Draw, change, run, count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="files or folders whose code is changed")
    parser.add_argument("--draws", type=int, default=40, help="number of changes")
    parser.add_argument("--seed", type=int, default=0, help="random seed for the draws")
    parser.add_argument("--seconds", type=int, default=300, help="time after which tests count as failed")
    parser.add_argument("--same-as", type=Path, help="change only what this other checkout has, too")
    parser.add_argument("--slow", action="store_true", help="run the slow tests where the others notice nothing")
    options = parser.parse_args()
    given = [folder.resolve() for folder in options.folders]
    files = sorted(file for folder in given for file in ([folder] if folder.is_file() else folder.rglob("*.py")))
    noticed: list[str | None] = []
    drawn = draw(files, options.draws, options.seed, options.same_as)
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "node_modules", "__pycache__"))
        for number, (file, name, index) in enumerate(drawn, 1):
            text, line = changed(file, name, index)
            place = file.relative_to(ROOT)
            (tree / place).write_text(text, encoding="utf-8")
            runs = ["not slow", "slow"] if options.slow else ["not slow"]
            found = next((marks for marks in runs if fail(tree, tests_of(file), marks, options.seconds)), None)
            shutil.copy(file, tree / place)
            noticed.append(found)
            said = {"not slow": "noticed ", "slow": "slowly  ", None: "SURVIVED"}[found]
            source = file.read_text(encoding="utf-8").splitlines()[line - 1].strip()
            print(f"{number:3d} {said} {place}:{line}: {source[:90]}", flush=True)
    default, slowly = (noticed.count(marks) for marks in ("not slow", "slow"))
    print(f"Seed {options.seed}: {default} of {len(drawn)} noticed by default tests, {slowly} by slow ones alone.")


if __name__ == "__main__":
    main()
