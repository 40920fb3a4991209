"""The question dispersion."""
