"""The section landscape of a report."""
