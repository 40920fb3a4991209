"""Attention calls: captured, reduced to statistics of their rows, monitored during training."""
