"""Lets ``python -m headrace`` be the command line."""

from headrace.cli.main import main

if __name__ == "__main__":
    main()
