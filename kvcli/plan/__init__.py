"""Plans a run before it is started: bytes and an upper bound of memory."""
