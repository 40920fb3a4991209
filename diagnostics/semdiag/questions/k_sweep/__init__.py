"""The question k sweep."""
