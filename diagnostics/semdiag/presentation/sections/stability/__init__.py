"""The section stability of a report."""
