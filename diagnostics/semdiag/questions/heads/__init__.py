"""The question heads."""
