"""The section separation of a report."""
