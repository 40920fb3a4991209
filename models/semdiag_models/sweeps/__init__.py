"""Grids of runs: read, plan, and train them in processes or on Ray."""
