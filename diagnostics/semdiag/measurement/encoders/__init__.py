"""What only semdiag's own encoders tell: weights, traces of inputs, moved parameters."""
