"""Presentation: figures and the report, drawn from measurements alone."""
