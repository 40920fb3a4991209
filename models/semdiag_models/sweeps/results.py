"""The table of a sweep's results, as CSV and JSON."""

import csv
import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from semdiag_models.plain_text import csv_cell
from semdiag_models.sweeps.runs import RunResult
from semdiag_models.writing import write_text

SCHEMA = "semdiag.sweep/1"


def results_document(rows: list[RunResult], provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the results as plain values for JSON."""
    return {"schema": SCHEMA, "provenance": provenance, "results": [row.to_dict() for row in rows]}


def write_results(folder: Path, rows: list[RunResult], provenance: dict[str, Any]) -> None:
    """Write ``results.csv`` and ``results.json``, each whole or not at all."""
    table = io.StringIO()
    writer = csv.DictWriter(table, [field.name for field in fields(RunResult)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = row.to_dict()
        writer.writerow({key: csv_cell(cell) if isinstance(cell, str) else cell for key, cell in cells.items()})
    document = json.dumps(results_document(rows, provenance), indent=1, allow_nan=False)
    for name, text in (("results.csv", table.getvalue()), ("results.json", document + "\n")):
        write_text(folder / name, text)
