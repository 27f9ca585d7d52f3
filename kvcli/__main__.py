"""`python -m kvcli`."""

from kvcli.cli.start import main

if __name__ == "__main__":
    main()
