"""`python -m dsv4cli` is `dsv4`."""

from dsv4cli.cli import main

if __name__ == "__main__":
    main()
