"""Attention by hand: followed from the product of queries and keys to the softmax, and on to the values."""
