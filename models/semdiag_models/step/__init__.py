"""The trainer's step: hand-derived loss and gradients."""
