"""The section k-sweep of a report."""
