"""Measurement: from attention calls to tidy tables and verdicts."""
