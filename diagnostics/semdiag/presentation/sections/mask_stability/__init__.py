"""The section mask-stability of a report."""
