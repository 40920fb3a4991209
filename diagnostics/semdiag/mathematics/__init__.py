"""Layer 1: the mathematics. Tensors and floats in, tensors and floats out."""
