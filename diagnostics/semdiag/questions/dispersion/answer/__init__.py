"""What the tables of this question say."""
