"""Findings: tables to comparisons, verdicts and JSON; one file a question, no model in sight."""
