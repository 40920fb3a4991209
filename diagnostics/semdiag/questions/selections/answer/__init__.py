"""The answers on selections, as the object that ``--json`` prints."""
