"""The figure of a model's own selections."""
