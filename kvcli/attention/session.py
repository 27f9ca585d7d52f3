"""A model with a method attached: the session that makes caches and attends over them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Unpack, get_args

import torch
from torch import Tensor, nn

from kvcli.attention.backend import AttentionBackend, choose_backend
from kvcli.attention.compose import Composed, compose
from kvcli.attention.decoder import Decoder, LogitsNotFinite, default_mode
from kvcli.attention.generation import (
    Generated,
    Mode,
    NextToken,
    SamplingConfig,
    SamplingKeywords,
    checked_mask,
    prefill,
    sampling_of,
    stop_tokens,
)
from kvcli.attention.layer import attend_layer, flush_layer
from kvcli.attention.steps import Chunks
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.context import Context
from kvcli.cache.identity import CacheIdentity, codecs_identity
from kvcli.cache.layer import NewTokens
from kvcli.cache.others import make_writable
from kvcli.errors import CacheError, UnsupportedModelError, UsageError
from kvcli.kernels.launch import interpreted
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.models.fingerprint import fingerprint
from kvcli.models.load import not_finite
from kvcli.models.weights import adapters_now, config_values, weights_identity
from kvcli.progress import Advance, Progress, no_progress
from kvcli.registry import BASELINE, get_method
from kvcli.rope import Rope
from kvcli.seam.decoder import backbone, decoder_layers
from kvcli.seam.layer import AttentionCall
from kvcli.seam.patch import Seam
from kvcli.seam.versions import CACHE_ARGUMENT, cache_of, with_cache
from kvcli.spec import ModelSpec


class Session:
    """A model attached to a method; made by `attach`, ended by `detach` or by leaving the `with` block.

    Args:
        codecs: one per layer; those of layers that are not compressed are the baseline's.
        impl: `auto`, `fused` or `reference`.
        layers: indices of the layers that the method compresses; default all.
        fitted: whether the codecs' state comes from an artifact.

    Attributes:
        backend: what attention runs on; its `note` says why a method's own kernels are not used.
        backends: of each layer, with its soft cap.
        notes: a line each about what is unusual in how the model attends.
        seam: the patch on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        method: Method,
        config: CacheConfig,
        codecs: list[LayerCodec],
        impl: str,
        layers: Collection[int] | None = None,
        *,
        fitted: bool = False,
        model_name: str = "",
    ) -> None:
        self.model: Any = model
        self.spec, self.method, self.config, self.codecs = spec, method, config, codecs
        self.layers = frozenset(range(len(codecs)) if layers is None else layers)
        self._fitted, self._model_name = fitted, model_name or type(model).__name__
        device = devices_of_layers(model)[0]
        self.seam = Seam(model, self._attend, self._check_call, self._check_drafts)
        self.notes = self.seam.attention.notes
        self._baseline = choose_backend(get_method(BASELINE), (), impl, device)
        self.backend = choose_backend(method, [codecs[layer_idx] for layer_idx in sorted(self.layers)], impl, device)
        for layer_idx, codec in enumerate(codecs):
            codec.rotated = layer_idx not in spec.unrotated
            codec.use_kernels(self.backend.impl == "fused", device)
        self._known: CacheIdentity | None = None
        self._fused: Any = None
        self.seam.open()

    @property
    def rope(self) -> Rope:
        """The rotation of the layers' keys."""
        return self.seam.rope

    @property
    def backend(self) -> AttentionBackend:
        """How the compressed layers attend."""
        return self._backend

    @backend.setter
    def backend(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.backends = [
            (backend if layer.layer_idx in self.layers else self._baseline).with_soft_cap(layer.soft_cap)
            for layer in self.seam.attention.layers
        ]

    @property
    def true_bits(self) -> float:
        """Stored bits per key or value that is a code, scales and norms included, of all layers of full attention."""
        return fmean(bits for codec in self.codecs for bits in codec.bits)

    def check_later_passes(self) -> None:
        """Raises ModelError where a text cannot be read in several passes (`ModelAttention.drops_state`)."""
        self.seam.attention.check_later_passes()

    def new_cache(self, length: int | None = None) -> CompressedCache:
        """An empty cache, for one call of `generate` or the passes over one batch.

        Args:
            length: tokens of a row in the end, where the model rotates long texts differently (`Rope.switch`); None:
                those of the first pass, or of the prompt that `generate` is given.
        """
        identity, layers = partial(self._identity_since, weights_identity(self.model)), len(self.layers)
        cache = CompressedCache(self.spec, self.method, self.config, self.codecs, self.seam, layers, identity)
        cache.adapters = adapters_now(self.model)
        if length is not None:
            cache.sequences.begin(length)
        return cache

    def load_cache(self, source: str | Path | Context, *, release: bool = False) -> CompressedCache:
        """A cache that goes on, with the very numbers, from what `save` wrote or a context, which `release` empties.

        Raises:
            CacheError: a file that is missing, damaged, or of another model, RoPE, dtype, method, artifact or setting.
        """
        context = source if isinstance(source, Context) else Context.load(source, self.model.device)
        length = self.check_context(context)
        cache = self.new_cache()
        cache.sequences.rope = self.rope.for_length(length)
        cache.restore(context.snapshot, release or context is not source)
        return cache

    def check_context(self, context: Context, expected: CacheIdentity | None = None) -> int:
        """Checks that a context is one that this session could have made; returns the length by which it was rotated.

        `expected`: this session's identity at that length, where many are checked. CacheError: the context is of
        another model, RoPE, dtype, method, artifact or setting, or contradicts itself.
        """
        length, switch = max(context.snapshot.counts.lengths), self.rope.switch
        reason = (expected or self.identity(length)).difference(context.identity)
        if reason is not None and switch is not None and length <= switch:  # it may be the beginning of a longer text
            length = switch + 1
            reason = self.identity(length).difference(context.identity)
        if reason is not None:
            raise CacheError(f"{context.name} was made {reason}")
        try:
            context.snapshot.check(self.model.dtype)
            ids = context.input_ids
            known: int = getattr(self.model.get_input_embeddings(), "num_embeddings", self.spec.vocab_size)
            if ids is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
                raise CacheError(f"it has token ids {ids.min()} to {ids.max()}, but the model knows 0 to {known - 1}")
        except CacheError as error:
            raise CacheError(f"{context.name} contradicts itself: {error}") from error
        return length

    def identity(self, length: int = 1) -> CacheIdentity:
        """What the content of this session's caches depends on, with the adapters that are active now.

        Of caches of texts of so many tokens, where that matters (`Rope.switch`).
        """
        weights = weights_identity(self.model)
        if self._known is None or self._known.weights != weights:
            self._known = CacheIdentity(
                model=self._model_name,
                fingerprint=fingerprint(self.model, self.spec),
                weights=weights,
                dtype=str(self.model.dtype).removeprefix("torch."),
                rope=self.rope.frequencies(),
                method=self.method.name,
                config=self.config.model_dump(mode="json"),
                layers=sorted(self.layers),
                codecs=codecs_identity(self.codecs, self._fitted),
                model_config=config_values(self.model),
            )
        known, rope = self._known, self.rope
        return known if rope.switch is None else replace(known, rope=rope.for_length(length).frequencies())

    def _identity_since(self, weights: str) -> CacheIdentity:
        """The identity of a cache that was made with these weights; CacheError: the model has others now."""
        if weights != (identity := self.identity()).weights:
            raise CacheError("the model's weights or active adapters have changed since the cache was made; read again")
        return identity

    def warmup(self, batch: int = 1, progress: Progress = no_progress, chunk: int | None = None) -> list[str]:
        """Compiles the Triton kernels that this session launches for batches of so many rows, side by side, at once.

        Otherwise each is compiled one after another when it is launched first, for minutes in all. Triton keeps what it
        compiled on disk, so that later it is only loaded.

        Args:
            batch: rows of the caches to come.
            progress: shows how many kernels are compiled; default: nothing is shown.
            chunk: the width of `chunks` to come, if there are any.

        Returns:
            names of the kernels, one per variant that was compiled or loaded; none where no kernels run.
        """
        if self.backend.impl != "fused" or interpreted():
            return []
        from kvcli.attention.warmup import warm_up

        devices = devices_of_layers(self.model)
        layers = [(devices[self.spec.in_model(layer_idx)], x) for layer_idx, x in enumerate(self.backends)]
        width = chunk if chunk and chunk < self.backend.prefill_threshold else None
        self.fused_modules()
        return warm_up(self.new_cache, layers, self.model.dtype, batch, progress, width, self._fused.launch)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        sampling: SamplingConfig | None = None,
        cache: CompressedCache | None = None,
        past_key_values: CompressedCache | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        prefill_chunk: int | None = None,
        on_tokens: Callable[[Tensor], None] = lambda tokens: None,
        on_prefill: Advance = lambda count: None,
        mode: Mode | None = None,
        **keywords: Unpack[SamplingKeywords],
    ) -> Generated:
        """Continues prompts; on a GPU with the session's kernels, decode steps are replayed as CUDA graphs.

        transformers' own `generate` works with an attached model, too; it launches every kernel of every step from
        Python, which takes longer than a GPU needs for a step. Beam search and speculative decoding are only there.

        Args:
            input_ids: int64 [batch, time].
            attention_mask: [batch, time], 0 at padding, which stands on the left; None: no padding.
            sampling: how tokens are chosen, and how many at most; default: greedily, 64.
            cache: holds the first of `input_ids`; default: a new one.
            past_key_values: the name of `cache` before transformers 5.24.
            eos_token_id: tokens that end a row; default: those of the model's configs.
            pad_token_id: what follows a row's end; default: the generation config's, or the first of `eos_token_id`.
            prefill_chunk: prompt tokens per forward pass; None: all of them.
            on_tokens: called with new tokens, int64 [batch, count] on the host, a few steps at a time.
            on_prefill: called with the number of prompt tokens per row after each forward pass that reads some.
            mode: `graphs`; `steps`, the same without capturing them; or `passes`, ordinary forward passes; default:
                `graphs` on a GPU with the session's kernels, else `passes`. In graphs and steps, kernels also stand in
                for norms, projections and MLPs (`kvcli.attention.fused_modules`), which round otherwise.
            keywords: max_new_tokens, temperature, top_p, top_k, repetition_penalty and do_sample as transformers takes
                them, in place of `sampling`.

        Raises:
            UsageError: other keywords, some beside `sampling`, or a cache twice; other types or shapes, ids without an
                embedding, a row without a token, padding not on the left, a cache of another class or of the whole
                prompt, no token to make, or `graphs` without a GPU.
            ModelError: logits that are not finite.
        """
        sampling = sampling_of(sampling, keywords)
        if sampling.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be 1 or more, not {sampling.max_new_tokens}")
        if mode not in (None, *get_args(Mode)):
            raise UsageError(f"mode is {' or '.join(get_args(Mode))}, not {mode!r}")
        attention_mask = checked_mask(self.model, input_ids, attention_mask, prefill_chunk)
        if mode == "graphs" and not input_ids.is_cuda:
            raise UsageError("CUDA graphs need a GPU; choose steps or passes")
        if cache is not None and past_key_values is not None:
            raise UsageError("past_key_values is the older name of cache; give one of the two")
        given = cache if cache is not None else past_key_values
        cache = self.new_cache() if given is None else given
        if not isinstance(cache, CompressedCache):
            raise UsageError(f"cache is what session.new_cache() made, not a {type(cache).__name__}")
        logits = prefill(self.model, cache, input_ids, attention_mask, prefill_chunk, on_prefill)
        stops, padding = stop_tokens(self.model, eos_token_id, pad_token_id)
        if mode is None:
            mode = default_mode(cache, input_ids.device, fused=self.backend.impl == "fused")
        decoder = Decoder(
            self.model,
            cache,
            self.backends,
            NextToken(sampling, input_ids, logits.shape[-1], mask=attention_mask),
            sampling.max_new_tokens,
            stops=stops,
            padding=padding,
            mode=mode,
            modules=self.fused_modules() if mode != "passes" else nullcontext,
        )

        def read_again(made: Tensor, mask: Tensor | None) -> Tensor:
            return prefill(self.model, cache, torch.cat((input_ids, made), dim=1), mask, prefill_chunk)

        try:
            decoder.run(logits, attention_mask, on_tokens, read_again)
        except LogitsNotFinite:
            again = partial(backbone(self.model), input_ids=input_ids, **with_cache(self.new_cache()))
            raise not_finite(self.model, f"method '{self.method.name}'", again) from None
        sequences = torch.cat((input_ids, decoder.tokens[:, : decoder.num_tokens]), dim=1)
        used, graphs = decoder.steps.mode if decoder.stepped else "passes", decoder.steps.graphs
        return Generated(sequences, decoder.num_tokens, cache, used, graphs.nbytes, graphs.note)

    def chunks(self, cache: CompressedCache, width: int, left: int, mode: Mode | None = None) -> Chunks:
        """What reads `left` tokens per row into a cache, `width` in each call: a forward pass of the model.

        On a GPU, passes of up to 63 tokens per row are replayed as CUDA graphs, as decode steps are: launched from
        Python, they take several times as long. Use it in `contextlib.closing`.

        Args:
            cache: of this session, without padding.
            mode: as in `generate`.

        Raises:
            CacheError: a cache of another session.
            UsageError: `graphs` without a GPU, or steps for a cache that they cannot serve.
        """
        cache.check_session(self.seam)
        mode = mode or default_mode(cache, self.model.device, fused=self.backend.impl == "fused", width=width)
        if mode == "graphs" and self.model.device.type != "cuda":
            raise UsageError("CUDA graphs need a GPU; choose steps or passes")
        if mode != "passes" and (obstacle := cache.step_obstacle(width)) is not None:
            raise UsageError(obstacle)
        return Chunks(self.model, cache, self.backends, width, left, mode)

    def fused_modules(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes blocks in which modules of the model run kernels; it runs as it is where none run."""
        if self.backend.impl != "fused":
            return nullcontext
        if self._fused is None:
            from kvcli.attention.fused_modules import FusedModules

            self._fused = FusedModules(self.model)
        return self._fused.active

    @torch.inference_mode()
    def flush(self, cache: CompressedCache) -> None:
        """Encodes all whole groups of a cache's tokens after the sinks, also those that its settings keep exact.

        Where a prompt is flushed after each of some passes that end with whole groups, `crop` makes of the longer cache
        what it was after an earlier one of these passes, bit for bit.

        Raises:
            CacheError: an empty cache, one of another session, or values beyond what the codes hold.
        """
        cache.check_session(self.seam)
        cache.passes.check_at_rest()
        sequences = cache.sequences
        counts = sequences.append((0,) * len(sequences.lengths), sequences.valid, everything=True)
        if counts.flushes:
            forward = cache.passes.encoding(counts)
            with cache.passes.complete_or_refused():
                for layer_idx, (layer, backend) in enumerate(zip(cache.compressed, self.backends, strict=True)):
                    here = forward.on(layer.store.keys.device)
                    layer.store.reserve(here)
                    flush_layer(layer.store, here, backend, layer_idx, 0)
                forward.ranges.check()

    def compose(
        self,
        contexts: Sequence[Context],
        *,
        repair: float = 0.1,
        starts: Sequence[int] | None = None,
        prefill_chunk: int | None = None,
        progress: Progress = no_progress,
    ) -> Composed:
        """A cache of documents that were each read alone, in this order; no code but those read again is touched.

        One document alone is its own context, bit for bit. Of several, only the sinks of the first are in full
        precision.

        Args:
            contexts: of this session, each one text.
            repair: share of the later documents' tokens that are read again, with those before them in sight.
            starts: at which of its tokens the document of each context begins; what is before, which documents have in
                common, is taken from the first. Default: their notes, as `kvcli.text.document` writes them, or 0.
            prefill_chunk: tokens per pass that reads again; None: all.

        Raises:
            UsageError: a model or method of which a text's codes are of its place, or contexts of anything else.
            CacheError: as for `load_cache`.
        """
        return compose(self, contexts, repair, starts, prefill_chunk, progress)

    def detach(self) -> None:
        """Restores the model exactly; detaching twice is harmless."""
        self.seam.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def _check_call(self, call: Mapping[str, Any]) -> None:
        """Raises CacheError where a forward pass would write pre-RoPE keys to a cache that is not this session's."""
        cache = cache_of(call)
        self.seam.current.rope = None
        if isinstance(cache, CompressedCache):
            cache.check_session(self.seam)
            if cache.adapters != adapters_now(self.model):
                cache.adapters = None
            rope = cache.sequences.rope
            if not torch.is_inference_mode_enabled():
                make_writable(cache.other_layers)
            self.seam.current.rope = rope if rope.length is not None else None
        elif cache is not None or call["use_cache"]:
            # Phi-3's own generate drops its cache where a text grows over this length
            limit = getattr(self.model.config, "original_max_position_embeddings", None)
            note = f"; its generate drops the cache where a text grows over {limit} tokens: session.generate does not"
            raise CacheError(
                f"while a model is attached, pass {CACHE_ARGUMENT}=session.new_cache() to it, a new one to each call "
                f"of generate (whose guidance_scale is not supported) or of a pipeline, or use_cache=False"
                f"{'' if limit is None else note}"
            )

    def _check_drafts(self, cache: Any) -> None:
        """Raises CacheError where drafted tokens could not be removed from a cache again."""
        if isinstance(cache, CompressedCache):
            cache.sequences.check_rollback()

    def _attend(self, call: AttentionCall) -> Tensor:
        if not isinstance(call.key, NewTokens):
            return call.exact()
        backend, query = self.backends[call.layer.layer_idx], call.query
        # Triton launches on the current GPU, whatever its arguments are on
        elsewhere = query.is_cuda and query.device.index != torch.cuda.current_device()
        with torch.cuda.device(query.device) if elsewhere else nullcontext():
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                output = attend_layer(call, backend)
            new = call.key
            self.seam.current.on_failure = new.layer.passes.break_off
            if not torch.is_grad_enabled():
                return output
            refused: Tensor = _RefuseBackward.apply(output, call.query, new.key, new.value)  # type: ignore[no-untyped-call]
            return refused


class _RefuseBackward(torch.autograd.Function):
    """An output that was computed without a graph: using its gradient is an error, not a silent zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        """The output; it requires a gradient if one of the inputs does."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Raises CacheError."""
        raise CacheError("no gradient passes through a compressed cache; train with use_cache=False")


def devices_of_layers(model: nn.Module) -> list[torch.device]:
    """The device of each decoder layer; UnsupportedModelError for layers that are on several, or not in memory."""
    devices: list[torch.device] = []
    for layer_idx, layer in enumerate(decoder_layers(model)):
        # adapters and quantized projections keep their weights under names, and in buffers, of their own
        used = {x.device for x in chain(layer.parameters(), layer.buffers())}
        if any(device.type == "meta" for device in used):
            raise UnsupportedModelError(
                f"layer {layer_idx} is offloaded or not loaded (device meta); kvcli needs its weights on its device: "
                "load the model without offloading, over more GPUs or with quantized weights"
            )
        if len(used) != 1:
            names = ", ".join(sorted(map(str, used))) or "none"
            raise UnsupportedModelError(f"the weights of layer {layer_idx} are on several devices ({names})")
        devices += used
    if len({device.type for device in devices}) > 1:
        names = ", ".join(sorted({str(device) for device in devices}))
        raise UnsupportedModelError(f"the model's layers are on devices of different types ({names})")
    return devices
