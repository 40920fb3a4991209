"""Write docs/commands/options.md, every option of every command: ``python docs/options.py``."""

import re
from pathlib import Path
from typing import Any

import typer.main

from semdiag.commands.main import app

PAGE = Path(__file__).parent / "commands" / "options.md"


def page() -> str:
    """Return the page."""
    made = "Made from the program by `python docs/options.py`; the same as `semdiag COMMAND --help-all`."
    parts = ["# Every option", made]
    group: Any = typer.main.get_command(app)
    described: dict[str, str] = {}  # by row, the command that has it first: shared options are described once
    for name, command in group.commands.items():
        rows, again = [], []
        for param in command.params:
            if param.name == "help" or getattr(param, "hidden", False):
                continue
            row = f"| {_names(param)} | {_text(param.help or '')} |"
            if described.setdefault(row, name) == name:
                rows.append(row)
            else:
                again.append(_names(param).split()[0].strip("`"))
        parts.append(f"## {name}")
        parts.append(_text((command.help or "").split("\n\n")[0]))
        if rows:
            parts.append("\n".join(["| option | |", "|---|---|", *rows]))
        if again:
            parts.append(f"As above: {', '.join(f'`{word}`' for word in again)}.")
    return "\n\n".join(parts) + "\n"


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or (param.name or '').upper()}`"
    value = getattr(param, "metavar", None)
    return f"`{', '.join(param.opts)}{f' {value}' if value else ''}`"


def _text(text: str) -> str:
    return " ".join(re.sub(r"\[/?(?:bold)?\]", "", text).split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
