"""What every question asks of the tables: pairs, percentiles, intervals, words for numbers."""
