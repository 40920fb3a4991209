"""The section ``convergence`` of a report."""

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.glance import measured_glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import with_run_facts
from semdiag.questions.convergence.answer.epochs import arrivals
from semdiag.questions.convergence.answer.speed_and_dispersion import run_statistics, speed_dispersion_table
from semdiag.questions.convergence.figures.learning_curves import learning_curves
from semdiag.questions.convergence.figures.speed_up import speed_up
from semdiag.questions.convergence.figures.speed_up_against_dispersion import speed_up_against_dispersion
from semdiag.questions.convergence.words import convergence_in_short, convergence_sentences


def convergence_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return runs, history (of their epochs), speed_ups, over_seeds."""
    return {
        "runs": findings(arrivals),
        "speed_ups": findings(speed_dispersion_table),
        "over_seeds": findings(run_statistics),
        "history": with_run_facts(findings, findings.measurements.history),
    }


_HEADINGS = (
    Heading(
        "convergence",
        "Which attention learns faster, and by how much?",
        (
            Shown(
                learning_curves,
                "Training and held-out accuracy against epochs, one panel per task, median and range over seeds "
                "for each attention: {shown}.",
                "Thick lines are training accuracy: of each run or, from three seeds on, their median with their "
                "range. Markers on the dashed line are the epochs at which single runs reach the target. A curve "
                "that ends below the line belongs to a run that did not reach it in its epochs.",
            ),
            Shown(
                speed_up,
                "Speed-up over full attention by task and attention, logarithmic axis with a line at 1, arrows "
                "where only a bound is known: {shown}.",
                "Points above the line learned in fewer epochs than full attention of the same seed. An arrow "
                "means that one run never reached the target: the true speed-up lies somewhere in its direction.",
            ),
            Shown(
                speed_up_against_dispersion,
                "Speed-up over full attention against the ratio of median dispersions at the last checkpoint, "
                "logarithmic axes: {shown}.",
                "If a smaller dispersion went with faster learning, points would fall from the upper left to the "
                "lower right. Bars are intervals over inputs only. Runs of one attention are not independent "
                "points.",
            ),
        ),
        (
            "Runs that never reach the target are censored, not dropped: medians of epochs are Kaplan–Meier "
            "estimates, and medians of speed-ups are ranges where only a bound is known.",
            "Intervals over seeds are order statistics and hold for any distribution; their confidence is given "
            "because with few seeds it is low. One seed has no interval.",
            "Epochs are counted, not seconds. A correlation of final checkpoints' dispersion with speed does not "
            "show that one causes the other: both are measured after training.",
        ),
    ),
)


SECTION = Section(
    name="convergence",
    needs=("runs",),
    glance=measured_glance("runs"),
    headings=_HEADINGS,
    external=(),
    in_short=convergence_in_short,
    details=convergence_sentences,
    tables=convergence_tables,
)
