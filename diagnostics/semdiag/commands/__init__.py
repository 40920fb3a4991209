"""The command line: parsing and the error border, nothing else."""
