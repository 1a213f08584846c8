"""`python -m minispec`."""

from minispec.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
