"""Turn attention calls into tables; what all questions ask of the tables."""
