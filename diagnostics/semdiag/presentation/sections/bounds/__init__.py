"""The section bounds of a report."""
