"""The question predictors."""
