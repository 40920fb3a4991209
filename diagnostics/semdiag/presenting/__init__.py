"""How numbers are shown: figures' style, the terminal, and the contracts of a question and of a figure."""
