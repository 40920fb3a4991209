"""The question learning."""
