"""The page of a report, and the gate of ``semdiag check``: loops over the registry."""
