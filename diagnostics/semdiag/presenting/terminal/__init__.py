"""Output on the terminal: tables, progress, texts."""
