"""Do runs with the smaller dispersion learn faster? Speed-up beside δ_h/δ_s."""

import pandas as pd

from semdiag.measuring.findings.distributions import known_rows
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import ratio_interval
from semdiag.questions.convergence.answer.epochs import arrivals, over_seeds, speed_ups

_RESAMPLES = 200


def speed_dispersion_table(findings: Findings) -> pd.DataFrame:
    """Return the speed-up of every pair of runs beside the ratio of their pooled median dispersions."""
    pairs = speed_ups(findings(arrivals))
    queries = {m: known_rows(findings, m, "dispersion") for m in {*pairs["model"], *pairs["full"]}}
    intervals = [
        ratio_interval(queries[pair["model"]], queries[pair["full"]], resamples=_RESAMPLES)
        for pair in pairs.to_dict("records")
    ]
    return pairs.assign(
        ratio=[i.estimate for i in intervals],
        ratio_low=[i.low for i in intervals],
        ratio_high=[i.high for i in intervals],
    )


def run_statistics(findings: Findings) -> pd.DataFrame:
    """Return each kind of attention over the seeds of a setting, as :func:`~.epochs.over_seeds`."""
    return over_seeds(findings(arrivals), findings(speed_dispersion_table))
