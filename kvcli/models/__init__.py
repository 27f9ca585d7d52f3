"""Models by name, from folders, GGUF files and the hub; built-in models, and what a model is known by."""
