"""How far apart are the scores that a query mixes?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "dispersion",
    __name__,
    measured_by="measure:INITIALISATION_PROBE",
    summarised_by="answer.comparisons:dispersion_summary",
    shown_by="page:SECTION",
    asked_by="command:dispersion",
)
