"""The question mask stability."""
