"""What this question measures."""
