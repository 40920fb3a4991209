"""The section predictors of a report."""
