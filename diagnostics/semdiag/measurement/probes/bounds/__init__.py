"""The constants of the theory, and measured slopes beside them."""
