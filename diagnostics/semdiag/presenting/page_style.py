"""What semdiag's pages share: the style sheet, and how values reach a template."""

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from semdiag_models.reading import visible

if TYPE_CHECKING:
    from jinja2 import Environment


def page_style() -> str:
    """Return the style sheet with which all pages begin: light and dark colours, type, headings."""
    return files("semdiag.presenting").joinpath("page.css").read_text(encoding="utf-8").rstrip("\n")


def page_environment() -> "Environment":
    """Return jinja's settings for pages: every value is escaped, an unknown name is an error."""
    from jinja2 import Environment, StrictUndefined

    return Environment(
        autoescape=True, finalize=_shown, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _shown(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
