"""The judgements of ``semdiag check``."""
