"""What figures share."""
