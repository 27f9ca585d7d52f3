"""The version of kvcli."""

__version__ = "0.1.0"
