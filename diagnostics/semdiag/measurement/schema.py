"""Every table that measurements may have besides those that all have."""

from semdiag.measurement.kept_rows import SKETCHES
from semdiag.measurement.probes.registry import PROBES
from semdiag.measurement.runs.tables import RUN_TABLES
from semdiag.measurement.table import Table
from semdiag.measurement.tables import CALLS, HEADS, REMARKS, SKIPPED

_PROBED = tuple(table for probe in PROBES.values() for table in probe.tables)
_ALL = (CALLS, HEADS, REMARKS, SKIPPED, SKETCHES, *_PROBED, *RUN_TABLES)
OPTIONAL: dict[str, Table] = {table.name: table for table in _ALL}
