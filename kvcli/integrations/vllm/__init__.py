"""vLLM's pages as codes: `KVCLI_METHOD=turboquant-3 vllm serve MODEL --attention-backend CUSTOM`.

Beside that, `tier`, `groups` and `slots` are a tier of codes for vLLM's own cache and its offloading.
"""

from kvcli.errors import UsageError

NEEDED = "vLLM 0.26 or 0.31 to 0.33"
VERSIONS = ("0.26.", "0.31.", "0.32.", "0.33.")


def register() -> None:
    """Registers the backend where environment variables ask for it; vLLM calls it in every process.

    On a CPU, where vLLM takes no backend but its own, it takes their place; else it is `CUSTOM`.

    UsageError: a vLLM that is not known; KvcliError: a method or an artifact that cannot be used.
    """
    from kvcli.integrations.vllm.environment import choice_of_environment

    if choice_of_environment() is None:
        return
    try:
        import vllm
        from vllm.platforms import current_platform
        from vllm.v1.attention.backend import AttentionBackend
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if vllm.__version__.startswith(VERSIONS[0]):
            module = "v0_26"
        else:
            module, _ = "backend", AttentionBackend.customize_spec
    except (ImportError, AttributeError) as error:
        raise UsageError(f"codes in pages need {NEEDED}, which lay them out: {error}") from error
    register_backend(AttentionBackendEnum.CUSTOM, f"kvcli.integrations.vllm.{module}.CodesBackend")
    from kvcli.integrations.vllm.platform import choose_codes

    choose_codes(type(current_platform), is_cpu=current_platform.is_cpu())
