"""The tables of the section ``predictors``."""

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.tables import with_run_facts
from semdiag.questions.predictors.answer.mask_cells import mask_cells, run_outcomes
from semdiag.questions.predictors.answer.prediction import held_out_tasks, predictor_table


def predictor_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return the tables: correlations (predictors), their cells, the numbers behind them, held_out_tasks."""
    return {
        "predictors": findings(predictor_table),
        "cells": findings(mask_cells),
        "outcomes": findings(run_outcomes),
        "candidates": with_run_facts(findings, findings.measurements.predictors),
        "held_out_tasks": findings(held_out_tasks),
    }
