"""The section ``overlap`` of a report."""
