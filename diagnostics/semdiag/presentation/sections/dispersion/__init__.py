"""The section dispersion of a report."""
