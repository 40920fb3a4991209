"""semdiag."""
