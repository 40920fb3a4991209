"""Write docs/commands/options.md, every option of every command: ``python docs/options.py``."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import typer.main

from semdiag.commands.main import app

PAGE = Path(__file__).parent / "commands" / "options.md"
INTRODUCTION = (
    "Made from the program by `python docs/options.py`; `semdiag COMMAND --help-all` shows those of one command. "
    "[What the commands do](../README.md)."
)

ELSEWHERE = {  # what other pages tell at length
    "--inputs": "[Files of inputs](../README.md#inputs) to measure. Default: the inputs of the run or the model.",
    "--kinds": "[Kinds of sparse attention](k-sweep.md#kinds-of-sparse-attention) to run.",
    "--budget": "Write [a k for each layer and head](k-sweep.md#budgets) to this JSON file.",
    "--rerun": "Run the model with [real masks](k-sweep.md).",
    "--format": "[Number format](selections.md#the-classes) of the engine's scores, or of q and k with scales.",
    "--lengths": "Also run [pieces of these lengths](k-sweep.md#longer-texts).",
    "--precision": "[Number formats](quantities.md#in-a-number-format) that masks are compared with.",
    "--queries": "Measure only this many [random queries](../performance.md#drawn-queries) per sample and head.",
    "--every-layer": "Fail if δ_h < δ_s fails at the median of [a single layer](training.md#what-must-hold).",
}


def page() -> str:
    """Return the page: the options that most commands share, then the others of each."""
    group: Any = typer.main.get_command(app)
    items = {name: _items(command) for name, command in group.commands.items()}
    having = Counter(item for of_command in items.values() for item in of_command)
    shared = [item for item, number in having.items() if number >= len(items) / 2]
    parts = ["# Every option", INTRODUCTION, "## Shared options", "\n".join(shared)]
    described: dict[str, str] = {}  # by item, the command that has it first
    for name, having_it in items.items():
        parts.append(f"## {name}")
        others = [item for item in having_it if item not in shared]
        new = [item for item in others if described.setdefault(item, name) == name]
        if new:
            parts.append("\n".join(new))
        also = [_of_most(having_it, shared, new)]
        for first in dict.fromkeys(described[item] for item in others if item not in new):
            known = [_name(item) for item in others if item not in new and described[item] == first]
            also.append(f"{', '.join(known)} as in {first}")
        if any(also):
            parts.append(f"Also: {'; '.join(filter(None, also))}.")
    return "\n\n".join(parts) + "\n"


def _of_most(having_it: list[str], shared: list[str], new: list[str]) -> str:
    """Say which shared options a command has."""
    described = {_name(item) for item in new}
    has = [_name(item) for item in shared if item in having_it]
    lacks = [name for name in map(_name, shared) if name.startswith("`-") and name not in {*has, *described}]
    if len(lacks) >= len(has):
        return ", ".join(has)
    return f"all shared ones but {', '.join(lacks)}" if lacks else "all shared ones"


def _items(command: Any) -> list[str]:
    """Return a list item for each option of a command; hidden ones without help are no user's."""
    shown = [
        param for param in command.params
        if param.name != "help" and (getattr(param, "help", None) or not getattr(param, "hidden", False))
    ]  # fmt: skip
    return [f"- {_names(param)}: {_meaning(param)}" for param in shown]


def _meaning(param: Any) -> str:
    return ELSEWHERE.get(param.opts[0]) or _text(param.help or "")


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or (param.name or '').upper()}`"
    value = getattr(param, "metavar", None)
    return f"`{', '.join(param.opts)}{f' {value}' if value else ''}`"


def _name(item: str) -> str:
    """Return the name in an item, without what the option takes."""
    found = re.match(r"- `([^\s,`]+)", item)
    return f"`{found[1]}`" if found else item


def _text(text: str) -> str:
    return " ".join(re.sub(r"\[/?(?:bold)?\]", "", text).split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
