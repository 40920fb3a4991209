"""The question encoders."""
