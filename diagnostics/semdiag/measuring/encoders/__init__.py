"""Measurements of semdiag's own encoders, whose parts are all known."""
