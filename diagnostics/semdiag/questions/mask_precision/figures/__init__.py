"""The figures of this question."""
