"""The page and the gate: loops over the registry."""
