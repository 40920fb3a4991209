"""Tables of training runs, and what is known of them."""
