"""The artifact: fitted codecs of a whole model in one folder, bound to that model and verified.

    kvcli.json          what it is: format version, method, settings, model, provenance, held-out errors; size and
                        sha256 of codec.safetensors, and the sha256 of its own fields
    codec.safetensors   the state of every layer's codecs, `layers.L.key.*` and `layers.L.value.*`
    README.md           a model card, for people only

`metadata` says what the files hold; `artifact`, how they are read, replaced and used.
"""

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.metadata import metric_values, new_metadata

__all__ = ["Artifact", "metric_values", "new_metadata"]
