"""kvcli's own methods; the session lives as long as the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kvcli
from research.rivals.protocol import CacheSetting

PACKAGED = Path(kvcli.__file__).parent / "fitted" / "smollm2-135m" / "klt-2.25"


def cache(method: str, artifact: str | None = None) -> Any:
    """A new cache of a session that keeps the model attached."""

    def make(model: Any) -> Any:
        return kvcli.attach(model, method, artifact=artifact).new_cache()

    return make


SETTINGS = [
    *(
        CacheSetting(name, f"{bits} bits", cache(name))
        for name, bits in (("fp16", "16"), ("kivi-4", "5.00"), ("kivi-2", "3.00"))
    ),
    CacheSetting("klt-2.25", "2.37 bits", cache("klt-2.25", str(PACKAGED))),
    *(
        CacheSetting(Path(path).name, "an artifact", cache("", path))
        for path in filter(None, os.environ.get("KVCLI_ARTIFACTS", "").split(os.pathsep))
    ),
]
