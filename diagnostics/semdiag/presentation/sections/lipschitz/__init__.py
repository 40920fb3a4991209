"""The section lipschitz of a report."""
