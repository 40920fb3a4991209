"""Calls become tables: what every measurement has, and what all questions ask of the tables."""
