"""Head by head."""
