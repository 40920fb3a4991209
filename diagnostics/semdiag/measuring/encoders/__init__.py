"""Measurements of semdiag's own encoders, of which all parts are known."""
