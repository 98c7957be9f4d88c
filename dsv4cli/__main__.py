"""`dsv4`, and `python -m dsv4cli`: from the first import on, Ctrl-C ends it without a traceback."""

import sys


def main() -> None:
    """Carries out the command line."""
    try:
        from dsv4cli.cli import main as carry_out
    except KeyboardInterrupt:
        sys.exit(130)
    carry_out()


if __name__ == "__main__":
    main()
