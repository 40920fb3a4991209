"""What a section of a report is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shown:
    """A figure in a section.

    Attributes:
        figure: key of ``FIGURES``.
        alt: what it shows, for readers who do not see it; ``{models}`` is filled in.
        reading: two sentences: what to look at, what it means.
    """

    figure: str
    alt: str
    reading: str


@dataclass(frozen=True)
class Question:
    """A section.

    Attributes:
        anchor: its identifier in the page.
        section: the part of a report it belongs to: one of
            :data:`~semdiag.presentation.report.questions.SECTIONS`.
        title: the question.
        figures: that answer it.
        caveats: what the answer does not cover.
    """

    anchor: str
    section: str
    title: str
    figures: tuple[Shown, ...]
    caveats: tuple[str, ...]
