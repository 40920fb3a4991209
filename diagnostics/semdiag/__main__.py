"""``python -m semdiag``, and the command ``semdiag``: the program."""


def main() -> None:
    """Run the program; an interruption while it is still being loaded is one like any other."""
    try:
        from semdiag.commands.main import main as program
    except KeyboardInterrupt:
        import os

        os.write(2, b"semdiag: interrupted\n")
        os._exit(130)
    program()


if __name__ == "__main__":
    main()
