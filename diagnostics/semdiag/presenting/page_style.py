"""How semdiag's pages look: colours by day and by night, type, headings."""

from importlib.resources import files


def page_style() -> str:
    """Return the style sheet that all pages begin with."""
    return files("semdiag.presenting").joinpath("page.css").read_text(encoding="utf-8").rstrip("\n")
