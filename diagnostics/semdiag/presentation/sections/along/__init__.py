"""The section along of a report."""
