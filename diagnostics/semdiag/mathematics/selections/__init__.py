"""Selections: which keys a top-k chose, and whether they are the largest."""
