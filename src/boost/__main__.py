"""`python -m boost`."""

from boost.cli import main

if __name__ == "__main__":
    main()
