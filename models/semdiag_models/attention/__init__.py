"""Attention: its kinds, how each selects keys, and the products over all or selected keys."""
