"""A store of codes below SGLang's host memory (HiCache): `sglang serve --hicache-storage-backend dynamic`."""
