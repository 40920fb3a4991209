"""What semdiag check judges."""
