"""The module that an adapter of LMCache's server names: importing it registers the serde `kvcli`.

    {"type": "plugin", "module_path": "kvcli.integrations.lmcache.plugin", "class_name": "FileSystemAdapter",
     "adapter_params": {"base_path": "/data/chunks"},
     "serde": {"type": "kvcli", "model": "/models/llama", "method": "kivi-2"}}

LMCache looks for no serde by entry point; an adapter of type `plugin` is what makes the server import a module.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

from kvcli.integrations.lmcache.serde import register

register()


class FileSystemAdapter(FSL2Adapter):
    """LMCache's own adapter of type `fs`, with the parameters that it has.

    Args:
        config: its settings; `base_path` is the folder of the chunks.
        l1_memory_desc: the server's memory, which this adapter does not use.
    """

    config_class_name = "FSL2AdapterConfig"

    def __init__(self, config: FSL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        super().__init__(config)
