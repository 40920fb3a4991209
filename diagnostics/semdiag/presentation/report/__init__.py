"""The report: a page, its figures, tables and summary."""
