"""Selections as given: checked against their scores, and compared with each other."""
