"""Recognise hand-written attention: trace scores from q·kᵀ to the softmax, and weights from there to values."""
