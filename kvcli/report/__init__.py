"""Records of `kvcli eval` and `kvcli bench` as tables and as a page."""
