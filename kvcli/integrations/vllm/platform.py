"""Which layers get codes: checked for every engine, and chosen on a CPU, where vLLM has no choice of backends."""

from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcli.errors import UsageError
from kvcli.integrations.vllm.environment import METHOD, choice_of_environment
from kvcli.spec import ModelSpec


def choose_codes(platform: type[Any], *, is_cpu: bool) -> None:
    """Makes a platform of vLLM refuse, while variables ask for codes, engines that would have none.

    KvcliError, later: models of windows alone, a backend that was not named, attention that the backend does not have.
    """
    check = platform.check_and_update_config
    if hasattr(check, "without_codes"):
        return
    if is_cpu:
        _choose_on_a_cpu(platform)

    def checked(config: Any) -> None:
        if choice_of_environment() is not None and config.model_config is not None:
            ModelSpec.from_config(config.model_config.hf_text_config)
            attention = getattr(config, "attention_config", None)
            named = {getattr(attention, "backend", None), *getattr(attention, "backend_per_kind", {}).values()}
            if not is_cpu and AttentionBackendEnum.CUSTOM not in named:
                raise UsageError(f"{METHOD} asks for codes, which nobody computes: say --attention-backend CUSTOM")
        selector._cached_get_attn_backend.cache_clear()  # what it chose for another engine of this process
        check(config)

    checked.without_codes = check  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(checked)


def _choose_on_a_cpu(platform: type[Any]) -> None:
    """Layers without a window get codes, as if `CUSTOM` had been named, and are checked as a GPU's platform does it."""
    own = platform.get_attn_backend_cls

    def chosen(backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if attn_selector_config.has_sliding_window or choice_of_environment() is None:
            return str(own(backend, attn_selector_config, num_heads))
        path = AttentionBackendEnum.CUSTOM.get_path()
        asked = {**attn_selector_config._asdict(), "device_capability": None}
        if reasons := resolve_obj_by_qualname(path).validate_configuration(**asked):
            raise UsageError(f"codes in pages: {', '.join(reasons)}")
        return path

    platform.get_attn_backend_cls = staticmethod(chosen)
