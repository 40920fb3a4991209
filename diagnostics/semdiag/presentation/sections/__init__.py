"""The questions of a report, a folder each."""
