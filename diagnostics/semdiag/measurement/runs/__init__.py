"""Training runs: their histories, snapshots, other lengths, candidates."""
