"""Write documents that CPython ships, for the k-sweep of the headline: ``python documents.py FOLDER FILE.jsonl``.

Chapters of the language reference (``pydoc_data.topics``) and the docstrings of modules of the standard library,
one document each, of at least 2,048 tokens by the tokenizer in FOLDER; none shares more than 5% of its runs of
eight words with those before it. They are free to ship (PSF licence), and depend on the version of Python alone.
"""

import ast
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKENS = 2048
DOCUMENTS = 24
CHAPTERS = 12  # of the language reference, at most
RUN = 8  # words
SHARED = 0.05  # share of its runs of words that a document may have in common with others
CHARACTERS = 5 * TOKENS  # read of a candidate: more than its first tokens hold


def chapters() -> Iterator[tuple[str, str]]:
    """Yield the topics of ``help()``, the longest first."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items(), key=lambda topic: (-len(topic[1]), topic[0])):
        yield f"topic {name}", text


def modules() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of each module of the standard library, those with the longest first."""
    library = Path(ast.__file__).parent
    texts = []
    for path in sorted(library.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        strings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        texts.append((f"module {path.stem}", "\n\n".join(filter(None, strings))))
    yield from sorted(texts, key=lambda entry: (-len(entry[1]), entry[0]))


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    """Return every run of eight words."""
    words = text.split()
    return {tuple(words[at : at + RUN]) for at in range(len(words) - RUN + 1)}


def documents(tokenizer: Any) -> list[tuple[str, str]]:
    """Return name and text of each document."""
    selected: list[tuple[str, str]] = []
    earlier: set[tuple[str, ...]] = set()
    for candidates, most in ((chapters(), CHAPTERS), (modules(), DOCUMENTS)):
        for name, text in candidates:
            beginning = text[:CHARACTERS]
            runs = runs_of_words(beginning)
            is_long = len(tokenizer(beginning)["input_ids"]) >= TOKENS
            if is_long and len(selected) < most and len(runs & earlier) <= SHARED * len(runs):
                selected.append((name, beginning))
                earlier |= runs
    if len(selected) < DOCUMENTS:
        sys.exit(f"Python {platform.python_version()} ships {len(selected)} documents of {TOKENS:,} tokens.")
    return selected


def write(folder: Path, file: Path) -> None:
    """Write the documents, and print what they are."""
    from transformers import AutoTokenizer

    selected = documents(AutoTokenizer.from_pretrained(folder))
    content = "".join(json.dumps({"text": text}) + "\n" for _, text in selected)
    file.write_text(content, encoding="utf-8")
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    print(f"Python {platform.python_version()}, sha256 {digest}: {', '.join(name for name, _ in selected)}.")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER FILE.jsonl")
    write(Path(sys.argv[1]), Path(sys.argv[2]))
