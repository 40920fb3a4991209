"""What all questions share: pairs, percentiles, intervals, words for numbers."""
