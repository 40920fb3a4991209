"""What is known of training runs."""
