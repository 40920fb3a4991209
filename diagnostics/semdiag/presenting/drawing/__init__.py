"""What figures share: style, panels, curves, and saving."""
