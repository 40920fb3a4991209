"""Lipschitz constants and bounds of attention, layers, blocks and networks, in the paper's and in sound form."""
