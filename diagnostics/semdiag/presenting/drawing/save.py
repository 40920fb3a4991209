"""Saving figures: the same measurements give the same bytes."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.figure import Figure
from matplotlib.text import Text

from semdiag.presenting.drawing.style import paper_style
from semdiag_models import InputError
from semdiag_models.plain_text import visible

# Fields that would otherwise contain the date or a version.
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
FORMATS = tuple(_METADATA)
_PNG_DPI = 150


@paper_style
def save_figure(figure: Figure, path: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write a figure in several formats; control characters in its texts become their escapes."""
    unknown = [name for name in formats if name not in _METADATA]
    if unknown:
        raise InputError(f"Figures are written as {', '.join(FORMATS)}. Got {unknown[0]}.")
    _show_all(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.parent / f"{path.name}.{name}" for name in formats]
    canvas, layout, dpi = figure.canvas, figure.get_layout_engine(), figure.get_dpi()
    figure.set_dpi(_PNG_DPI)
    try:
        for name, file in zip(formats, files, strict=True):
            # Use the format's canvas directly: Figure.savefig draws everything twice, with a layout each time.
            getattr(get_registered_canvas_class(name)(figure), f"print_{name}")(file, metadata=_METADATA[name])
            figure.set_layout_engine("none")
            if name == "svg":  # tick labels are created while drawing, and are in it as comments
                drawn = file.read_text(encoding="utf-8")
                file.write_text(visible(drawn), encoding="utf-8", newline="\n")
    finally:
        figure.set_canvas(canvas)
        figure.set_layout_engine(layout)
        figure.set_dpi(dpi)
    return files


def _show_all(figure: Figure) -> None:
    """Escape control characters in a figure's texts, which would make an SVG invalid."""
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_text() != (shown := visible(text.get_text())):
            text.set_text(shown)
