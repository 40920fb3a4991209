"""One folder a question, one registry."""
