"""The question lengths."""
