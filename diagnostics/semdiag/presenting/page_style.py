"""The style of semdiag's pages: light and dark colours, type, headings."""

from importlib.resources import files


def page_style() -> str:
    """Return the style sheet with which all pages begin."""
    return files("semdiag.presenting").joinpath("page.css").read_text(encoding="utf-8").rstrip("\n")
