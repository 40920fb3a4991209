"""The section learning of a report."""
