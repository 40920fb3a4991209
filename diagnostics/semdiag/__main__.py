"""``python -m semdiag``: the program."""

from semdiag.commands.main import main

main()
