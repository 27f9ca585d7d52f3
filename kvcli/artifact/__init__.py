"""The artifact: fitted codecs of a whole model in one folder, bound to that model and verified.

    kvcli.json          what it is: format version, method, settings, model, provenance, held-out errors; size and
                        sha256 of codec.safetensors, and the sha256 of its own fields
    codec.safetensors   the state of every layer's codecs, `layers.L.key.*` and `layers.L.value.*`
    README.md           a model card, for people only

`metadata` says what the files hold; `artifact`, how they are read, replaced and used. `fit` fits layers and assembles
them; `recipe` is a method with settings for one model, as a file.
"""
