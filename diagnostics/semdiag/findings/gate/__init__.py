"""What ``semdiag check`` judges."""
