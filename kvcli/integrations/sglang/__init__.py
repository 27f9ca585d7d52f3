"""A store of codes below SGLang's host memory (HiCache): `sglang serve --hicache-storage-backend dynamic`.

storage.py   the class that SGLang imports; it alone imports SGLang
"""
