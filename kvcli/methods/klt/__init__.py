"""Transform coding of keys and values: a fitted transform per kv head, and bits where errors cost most."""
