"""Two models on the same inputs: their attention call by call, and their outputs."""
