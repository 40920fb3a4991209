"""Grids of runs: read, planned, run on processes or Ray."""
