"""Results in Python: summary, page, single figures."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.questions.registry import figures, sections
from semdiag.reporting.report import in_short, measured_sections, write_report
from semdiag.reporting.summary import summary as summary_of
from semdiag_models.errors import unknown_name


class Summary(dict[str, Any]):
    """The summary of a report as plain values, displayed as its verdict in sentences."""

    def __repr__(self) -> str:
        return "\n".join(self["verdict"])


def summary(found: Measurements | Findings) -> Summary:
    """Return the results: the verdict in words, a row per model, the verdicts on claims.

    Args:
        found: from :func:`semdiag.measure` or a probe.

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
    return Summary(summary_of(findings, "", in_short(findings, shown), shown, {}))


def report(found: Measurements | Findings, folder: Path | str, keep_queries: bool = False) -> Path:
    """Write the report: a page with the verdict, figures, tables and caveats.

    Args:
        found: from :func:`semdiag.measure` or a probe.
        folder: created if missing; an older report there is replaced.
        keep_queries: whether to keep every query in ``data/``, to redraw the report from.

    Returns:
        The page ``folder/index.html``.

    Raises:
        InputError: if the folder contains anything but a report, or cannot be written.
    """
    command = f"semdiag.report(found, {str(folder)!r})"
    return write_report(_findings(found), Path(folder), command, keep_queries=keep_queries)


def plot(found: Measurements | Findings, figure: str) -> Figure:
    """Draw one figure of a report.

    Args:
        found: from :func:`semdiag.measure` or a probe.
        figure: its name, like ``dispersion_by_layer``, which its file in a report also has.

    Returns:
        The figure; a notebook shows it, ``.savefig`` writes it.

    Raises:
        InputError: if no figure has this name; the message lists all.
        NothingToDrawError: if what it shows was not measured; the message says what is missing.
    """
    if figure not in figures():
        raise unknown_name("figure", figure, figures())
    return figures()[figure](_findings(found))


def _findings(measured: Measurements | Findings) -> Findings:
    return measured if isinstance(measured, Findings) else Findings(measured)
