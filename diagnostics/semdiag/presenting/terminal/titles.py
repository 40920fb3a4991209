"""Titles above the tables of one model."""

from typing import Any


def title(result: dict[str, Any]) -> str:
    """Return a model's title: its path, its task if it has one, its attention."""
    task = f"{result['task']} " if result["task"] else ""
    return f"{result['model']}  {task}{result['attention']}"
