"""Kernels that Numba compiles, to replace chains of torch operations."""
