"""Capture: from any model to a stream of attention calls."""
