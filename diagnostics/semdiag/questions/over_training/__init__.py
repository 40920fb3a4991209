"""The question over training."""
