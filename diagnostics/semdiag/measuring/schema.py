"""Every table that measurements may have besides those that all have."""

from semdiag.measuring.kept_rows import SKETCHES
from semdiag.questions.probes import PROBES
from semdiag.measuring.runs.tables import RUN_TABLES
from semdiag.measuring.table import Table
from semdiag.measuring.tables import CALLS, HEADS, REMARKS, SKIPPED

_PROBED = tuple(table for probe in PROBES.values() for table in probe.tables)
_ALL = (CALLS, HEADS, REMARKS, SKIPPED, SKETCHES, *_PROBED, *RUN_TABLES)
OPTIONAL: dict[str, Table] = {table.name: table for table in _ALL}
