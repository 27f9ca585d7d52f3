"""The command line: the library raises, this room talks."""
