"""The loss around a checkpoint: planes, secants, gradients, Jacobians."""
