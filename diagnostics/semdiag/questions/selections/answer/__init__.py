"""What was found of selections, as the one object that ``--json`` prints."""
