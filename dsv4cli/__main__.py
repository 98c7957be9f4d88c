"""Entry point of `dsv4` and `python -m dsv4cli`: exits fast, and without a traceback on Ctrl-C at any time."""

import atexit
import os
import sys
import time

# oldest Python that runs dsv4, as in pyproject.toml
OLDEST = (3, 11)
# seconds for the terminal to read the last output: when its session ends with this program, unread output is lost
SECONDS = 0.05


def main() -> None:
    """Run the command line."""
    code: object = 1

    def end() -> None:
        # runs after all other exit handlers, and skips Python's slow teardown of PyTorch and GPU memory
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if os.getsid(0) == os.getpid() and (sys.stdout.isatty() or sys.stderr.isatty()):
            time.sleep(SECONDS)
        os._exit(code if isinstance(code, int) else code is not None)

    atexit.register(end)
    try:
        _carry_out()
        code = 0
    except KeyboardInterrupt:  # typed while it was imported
        code = 130
        sys.exit(code)
    except SystemExit as leaving:
        code = leaving.code
        raise


def _carry_out() -> None:
    """Import and run the program. If Python is too old or a package is missing, print the error and exit."""
    if sys.version_info < OLDEST:
        version = ".".join(map(str, OLDEST))
        sys.exit(
            f"error: dsv4 needs Python {version} or newer, and {sys.executable} is older\n"
            "→ use another, for example: python3.12 -m dsv4cli"
        )
    try:
        from dsv4cli.cli import main as carry_out
    except ModuleNotFoundError as error:
        from dsv4cli.errors import missing_package
        from dsv4cli.output import Colours, Output

        missing = missing_package(error)
        if missing is None:
            raise
        Output(Colours()).error(missing)
        sys.exit(missing.exit_code)
    carry_out()


if __name__ == "__main__":
    main()
