"""What input noise does to weights and masks."""
