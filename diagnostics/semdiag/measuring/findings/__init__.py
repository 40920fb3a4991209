"""What all questions share: pairs of models, percentiles, intervals, verdicts, and words for numbers."""
