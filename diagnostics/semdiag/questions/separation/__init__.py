"""The question separation."""
