"""Quality of a compressed cache, measured through the cache itself."""
