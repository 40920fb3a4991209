"""The section within of a report."""
