"""One input, and what every head makes of it."""
