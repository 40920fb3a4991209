"""What commands show in a terminal."""
