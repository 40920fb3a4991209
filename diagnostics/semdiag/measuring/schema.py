"""All optional tables of measurements, and the probes that fill them."""

from functools import cache
from importlib import import_module

from semdiag.measuring.kept_rows import SKETCHES
from semdiag.measuring.probe import Probe
from semdiag.measuring.runs.tables import RUN_TABLES
from semdiag.measuring.table import Table
from semdiag.measuring.tables import CALLS, HEADS, REMARKS, SKIPPED


@cache
def probes() -> dict[type, Probe]:
    """Return the probe of every plan, in the order of the registry of questions."""
    registry = import_module("semdiag.questions.registry")
    every = [question.probe for question in registry.QUESTIONS.values()]
    return {probe.plan: probe for probe in every if probe is not None}


@cache
def optional_tables() -> dict[str, Table]:
    """Return the declared tables by name: those of every forward pass, of probes, and of training runs."""
    probed = [table for probe in probes().values() for table in probe.tables]
    every = (CALLS, HEADS, REMARKS, SKIPPED, SKETCHES, *probed, *RUN_TABLES)
    return {table.name: table for table in every}
