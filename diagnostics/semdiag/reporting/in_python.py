"""Results in Python: the summary, the page, one figure."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.questions.registry import figures, sections
from semdiag.reporting import summary as whole
from semdiag.reporting.report import in_short, measured_sections, write_report
from semdiag_models.errors import unknown_name


class Summary(dict[str, Any]):
    """The summary of a report as plain values; shown as its verdict in sentences."""

    def __repr__(self) -> str:
        return "\n".join(self["verdict"])


def summary(found: Measurements | Findings) -> Summary:
    """Say what was found: the verdict in words, a row per model, what became of the claims.

    Args:
        found: what :func:`semdiag.measure` and the probes return.

    Returns:
        A dictionary as in a report's ``summary.json``, ready for JSON: ``verdict``, ``glances``, ``results``, ….

    Example:
        >>> import torch
        >>> from semdiag import measure
        >>> from semdiag_models import Encoder, ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> summary(measure(encoder, torch.tensor([[0, 1, 1, 0]])))["glances"]["dispersion"]["answer"]
        'cannot tell'
    """
    findings = _findings(found)
    shown = [sections()[name] for name in measured_sections(findings)]
    return Summary(whole.summary(findings, "", in_short(findings, shown), shown, {}))


def report(found: Measurements | Findings, folder: Path | str, keep_queries: bool = False) -> Path:
    """Write the report: a page with the verdict, figures, tables and caveats.

    Args:
        found: what :func:`semdiag.measure` and the probes return.
        folder: made if absent; an older report there is replaced.
        keep_queries: whether every query is kept in ``data/``, to redraw the report from.

    Returns:
        The page ``folder/index.html``.

    Raises:
        InputError: if the folder holds something else than a report, or cannot be written.
    """
    command = f"semdiag.report(found, {str(folder)!r})"
    return write_report(_findings(found), Path(folder), command, keep_queries=keep_queries)


def plot(found: Measurements | Findings, figure: str) -> Figure:
    """Draw one figure of a report.

    Args:
        found: what :func:`semdiag.measure` and the probes return.
        figure: its name, like ``dispersion_by_layer``; that of its file in a report.

    Returns:
        The figure; a notebook shows it, ``.savefig`` writes it.

    Raises:
        InputError: if no figure has this name; the message lists all.
        NothingToDrawError: if nothing of what it shows was measured; the message says what is missing.
    """
    if figure not in figures():
        raise unknown_name("figure", figure, figures())
    return figures()[figure](_findings(found))


def _findings(found: Measurements | Findings) -> Findings:
    return found if isinstance(found, Findings) else Findings(found)
