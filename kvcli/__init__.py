"""kvcli compresses the KV cache of long-context language models to 1-4 bits.

import kvcli
with kvcli.attach(model, "commvq", artifact="runs/smollm2-135m/commvq-2bit") as session:
    made = session.generate(**inputs, sampling=kvcli.SamplingConfig(max_new_tokens=256))
    print(made.sequences, made.cache.memory())
"""

from typing import TYPE_CHECKING, Any

from kvcli._version import __version__

if TYPE_CHECKING:
    from kvcli.artifact.artifact import Artifact
    from kvcli.attention.attach import attach, new_cache
    from kvcli.attention.generation import Generated, SamplingConfig
    from kvcli.attention.session import Session
    from kvcli.cache.compressed import MemoryReport
    from kvcli.cache.context import Context
    from kvcli.models.load import load_model
    from kvcli.text.document import Document
    from kvcli.text.library import Library

__all__ = [
    "Artifact",
    "Context",
    "Document",
    "Generated",
    "Library",
    "MemoryReport",
    "SamplingConfig",
    "Session",
    "__version__",
    "attach",
    "load_model",
    "new_cache",
]

_MODULES = {
    "Artifact": "kvcli.artifact.artifact",
    "Context": "kvcli.cache.context",
    "Document": "kvcli.text.document",
    "Generated": "kvcli.attention.generation",
    "Library": "kvcli.text.library",
    "MemoryReport": "kvcli.cache.compressed",
    "SamplingConfig": "kvcli.attention.generation",
    "Session": "kvcli.attention.session",
    "attach": "kvcli.attention.attach",
    "load_model": "kvcli.models.load",
    "new_cache": "kvcli.attention.attach",
}


def __dir__() -> list[str]:
    """The public names, also those that were not asked for yet."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first asked for: `import kvcli` must not load torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'kvcli' has no attribute '{name}'")
    from pkgutil import resolve_name

    return resolve_name(f"{_MODULES[name]}:{name}")
