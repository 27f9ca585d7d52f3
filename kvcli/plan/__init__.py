"""What a run will need before it is started: bytes, peak memory, time."""
