"""The question convergence."""
