"""The question calls."""
