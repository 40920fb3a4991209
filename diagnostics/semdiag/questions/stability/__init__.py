"""The question stability."""
