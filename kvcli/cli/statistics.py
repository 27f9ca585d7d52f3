"""Time, rate and memory of what was generated, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.commands.sizes import size
from kvcli.registry import BASELINE

if TYPE_CHECKING:
    from kvcli.attention.session import Session
    from kvcli.cache.compressed import MemoryReport
    from kvcli.text.generate import Generation


def compression_starts(session: Session) -> int | None:
    """Tokens of a prompt from which on the first of them is a code; None for a method that compresses nothing."""
    if session.method.name == BASELINE:
        return None
    schedules = session.method.schedules(session.config)
    return session.config.sink_length + min(x.keep + max(x.block, x.multiple_of, 1) for x in schedules)


def smaller_from(session: Session, memory: MemoryReport) -> int | None:
    """Where a compressed cache is larger than in fp16: tokens of a sequence from which on it is smaller; else None."""
    if session.method.name == BASELINE or memory.ratio >= 1:
        return None
    from kvcli.plan.cache import CachePlan

    shapes = session.spec, session.method, session.config, session.codecs, session.model.dtype
    return CachePlan.of_codecs(*shapes, fused=session.backend.impl == "fused").pays_from()


def describe_generation(generation: Generation, session: Session) -> str:
    """Time, rate and memory on two lines."""
    memory, starts_at = generation.memory, compression_starts(session)
    others = ""
    if memory.other_layers:
        others = (
            f"; {memory.other_layers} of {memory.layers + memory.other_layers} layers keep transformers' own cache of "
            f"{size(memory.other_bytes)}: the others have {100 * memory.share:.0f} % of an uncompressed one"
        )
    graphs = f", steps as CUDA graphs of {size(generation.graph_bytes)}" if generation.graph_bytes else ""
    reused = f" ({generation.reused_tokens} reused)" if generation.reused_tokens else ""
    time = (
        f"prompt {generation.prompt_tokens} tokens{reused}, {generation.new_tokens} new; "
        f"first token after {generation.ttft_s:.2f} s, then {generation.tokens_per_s:.1f} tokens/s{graphs}\n"
    )
    if starts_at is None:
        return f"{time}KV cache {size(memory.cache_bytes)} for {memory.num_tokens} tokens, not compressed{others}"
    if memory.num_encoded == 0 and memory.code_bytes == 0:
        return (
            f"{time}KV cache {size(memory.cache_bytes)}: all {memory.num_tokens} tokens are inside the full-precision "
            f"window; compression starts at {starts_at} tokens (a lower --residual-length starts earlier){others}"
        )
    pays_from = smaller_from(session, memory)
    larger = f"; larger than in fp16, as every context below {pays_from} tokens" if pays_from else ""
    return (
        f"{time}KV cache {size(memory.cache_bytes)}, in fp16 {size(memory.fp16_bytes)} ({memory.ratio:.2f}x): "
        f"{memory.num_encoded} of {memory.num_tokens} tokens as codes at {memory.key_bits:.2f} (K) / "
        f"{memory.value_bits:.2f} (V) bits, {size(memory.window_bytes)} in full precision; "
        f"codebooks and encoders {size(memory.artifact_bytes)} per model{larger}{others}"
    )
