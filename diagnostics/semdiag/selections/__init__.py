"""Indices that kernels, engines and indexers chose: read, judged, compared."""
