"""The question overlap."""
