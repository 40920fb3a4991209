"""Selections: the keys that a top-k chose, and whether they are the largest."""
