"""The section convergence of a report."""
