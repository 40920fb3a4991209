"""The question bounds."""
