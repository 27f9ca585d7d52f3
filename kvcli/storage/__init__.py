"""Files of kvcli: atomic writes, locks, sealed JSON, JSON lines, and tensors in safetensors files."""
