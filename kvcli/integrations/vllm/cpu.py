"""Codes on a CPU, where vLLM has one backend: layers of full attention get them, as if `CUSTOM` had been chosen."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcli.errors import UsageError
from kvcli.integrations.vllm.environment import choice_of_environment
from kvcli.spec import ModelSpec


def choose_codes(platform: type[Any]) -> None:
    """Makes a platform of vLLM choose codes for layers without a window, while variables ask for them.

    KvcliError, later: attention that the backend says it does not have, as a GPU's platform tells it; windows alone.
    """
    own = platform.get_attn_backend_cls
    if hasattr(own, "without_codes"):
        return

    def chosen(backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if choice_of_environment() is None:
            return str(own(backend, attn_selector_config, num_heads))
        ModelSpec.from_config(get_current_vllm_config().model_config.hf_text_config)  # refuses models of windows alone
        if attn_selector_config.has_sliding_window:
            return str(own(backend, attn_selector_config, num_heads))
        path = AttentionBackendEnum.CUSTOM.get_path()
        asked = {**attn_selector_config._asdict(), "device_capability": None}
        if reasons := resolve_obj_by_qualname(path).validate_configuration(**asked):
            raise UsageError(f"codes in pages: {', '.join(reasons)}")
        return path

    chosen.without_codes = own  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = staticmethod(chosen)
