"""The trainer's step: loss and gradients by hand."""
