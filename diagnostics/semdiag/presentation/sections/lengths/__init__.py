"""The section lengths of a report."""
