"""One folder a method; `kvcli.registry` lists them."""
