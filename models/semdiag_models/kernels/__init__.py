"""Kernels that Numba compiles, in place of chains of torch operations."""
