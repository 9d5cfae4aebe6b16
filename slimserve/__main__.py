"""`python -m slimserve` is the `slimserve` command."""

import sys


def run() -> int:
    """The command; of an interrupt while it is being loaded nothing is told but the status."""
    try:
        from slimserve.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
