"""The cache as transformers sees it: a `Cache` whose layers hand their new tokens to the attention function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, DynamicCache

from kvcli.cache.content import put, take
from kvcli.cache.context import Context
from kvcli.cache.counts import TokenCounts
from kvcli.cache.forward import Passes
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.layer import DETACHED, OTHER_MODEL, CompressedLayer, LayerStore
from kvcli.cache.others import EndOfPass, can_be_static, fill, states_of, take_states, windows_are_full
from kvcli.cache.sequences import Sequences
from kvcli.cache.snapshot import Snapshot
from kvcli.cache.window import ordinary_tensors
from kvcli.errors import CacheError
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.seam.layer import untraced
from kvcli.seam.patch import Seam
from kvcli.spec import ModelSpec, bits_per_value, layer_kinds


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache over all layers and sequences.

    Attributes:
        num_tokens: tokens held, summed over the sequences.
        num_encoded: tokens of them whose keys are codes.
        code_bytes: codes with their scales and norms, as far as they are in use.
        window_bytes: sinks and residual window, as far as they are in use; with tokens that are codes too (KIVI).
        position_bytes: positions and padding marks; RoPE tables of encoded tokens are made for each forward pass.
        state_bytes: what codecs keep per sequence, such as a subspace; it does not grow with the context.
        allocated_bytes: all tensors of the cache with the headroom of their buffers.
        artifact_bytes: codec buffers (codebooks, encoders, projections) and kernel tables derived from them, held once
            per model however many caches there are.
        fp16_bytes: the same tokens uncompressed in 16 bits.
        uncompressed_bytes: the same tokens uncompressed in the model's dtype.
        key_bits, value_bits: true stored bits per value of encoded tokens, scales and norms included; 0 without them.
        other_layers: how many layers keep transformers' own cache (sliding windows, linear attention and the like);
            all other figures are of the layers that attend to the whole context.
        other_bytes: what the caches of these hold.
    """

    num_tokens: int
    num_encoded: int
    code_bytes: int
    window_bytes: int
    position_bytes: int
    state_bytes: int
    allocated_bytes: int
    artifact_bytes: int
    fp16_bytes: int
    uncompressed_bytes: int
    key_bits: float
    value_bits: float
    nominal_bits: tuple[float, float]
    layers: int = 0
    other_layers: int = 0
    other_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Everything a cache holds: codes, sinks, window, positions and state."""
        return self.code_bytes + self.window_bytes + self.position_bytes + self.state_bytes

    @property
    def ratio(self) -> float:
        """fp16 bytes over cache bytes."""
        return self.fp16_bytes / self.cache_bytes if self.cache_bytes else 1.0

    @property
    def whole_ratio(self) -> float:
        """The same of all layers, of which the others are as large in both."""
        total = self.cache_bytes + self.other_bytes
        return (self.fp16_bytes + self.other_bytes) / total if total else 1.0

    @property
    def share(self) -> float:
        """What share of the model's whole cache, uncompressed, the layers of full attention have."""
        total = self.uncompressed_bytes + self.other_bytes
        return self.uncompressed_bytes / total if total else 1.0

    @property
    def true_bits(self) -> float:
        """True bits per value of encoded tokens, keys and values averaged."""
        return (self.key_bits + self.value_bits) / 2

    @property
    def effective_bits(self) -> float:
        """Bits per value of all tokens: sinks, residual window and positions included."""
        return 16 / self.ratio

    def __str__(self) -> str:
        """Bytes of all layers, in 16 bits too."""
        ours, fp16 = (x + self.other_bytes for x in (self.cache_bytes, self.fp16_bytes))
        return f"{ours:,} bytes, {fp16:,} in 16 bits ({self.whole_ratio:.2f} times as many)"

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        derived = ("cache_bytes", "ratio", "whole_ratio", "share", "true_bits", "effective_bits")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


class CompressedCache(Cache):
    """A drop-in cache of transformers that stores codes.

    Args:
        seam: the patch on the model that the cache is for.
        compressed_layers: how many of the codecs are the method's, the others being full precision; default all.
        identity: gives what stored tokens depend on; None: the cache cannot be saved.

    Attributes:
        sequences: lengths, positions and counts, shared by all layers.
        compressed: the layers of full attention.
        adapters: the model's when it was made, see `adapters_now`; None: others have read some of the tokens.
    """

    adapters: tuple[Any, ...] | None = ()

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        config: CacheConfig,
        codecs: list[LayerCodec],
        seam: Seam,
        compressed_layers: int | None = None,
        identity: Callable[[], CacheIdentity] | None = None,
    ) -> None:
        self.spec, self.method, self.config = spec, method, config
        self._codecs, self._seam, self._identity = codecs, seam, identity
        self._compressed_layers = len(codecs) if compressed_layers is None else compressed_layers
        self._hold(self._new_sequences())
        super().__init__(layers=self.layers)

    def check_session(self, seam: Seam) -> None:
        """Raises CacheError where another session's model is given this cache."""
        if self._seam is not seam:
            raise CacheError(OTHER_MODEL if self._seam.is_open else DETACHED)

    @ordinary_tensors
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache with the same tokens for the same session: tensors and counts are copied, nothing of the model."""
        shared = [self.spec, self.method, self.config, self._seam, self.sequences.rope, self._identity]
        for codec in self._codecs:
            shared += [codec, codec.key, codec.value]
        memo.update({id(x): x for x in shared})
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> Any:
        """Raises CacheError: a cache is of use only with the model that its session has attached."""
        raise CacheError(
            "a compressed cache cannot be pickled, because it belongs to an attached model; copy it with "
            "copy.deepcopy, or write it to a file with cache.save"
        )

    def _new_sequences(self) -> Sequences:
        groups = ((codec.key.tokens_per_group, codec.value.tokens_per_group) for codec in self._codecs)
        keys, values = map(max, zip(*groups, strict=True))
        counts = TokenCounts(self.method.schedules(self.config), self.config.sink_length, (keys, values))
        stateful = any(codec.new_state(1, torch.device("cpu")) is not None for codec in self._codecs)
        return Sequences(self._seam.rope, counts, stateful)

    def _hold(self, sequences: Sequences) -> None:
        """Takes sequences, and empty layers for them: the compressed ones, and transformers' own for the others."""
        self.sequences, self.passes = sequences, Passes(sequences, len(self._codecs))
        self.compressed: list[Any] = [
            CompressedLayer(codec, self.passes, self._seam, layer)
            for codec, layer in zip(self._codecs, self._seam.attention.layers, strict=True)
        ]
        self.layers: list[Any] = self.compressed
        self._drafts = False
        if self.spec.other_layers:
            self.layers = DynamicCache(config=self._seam.model.config).layers
            for layer_idx, layer in enumerate(self.compressed):
                self.layers[self.spec.in_model(layer_idx)] = layer

    @property
    def other_layers(self) -> list[Any]:
        """The layers of transformers' own, of sliding windows, linear attention and the like."""
        return [*self._others.values()]

    @property
    def _stores(self) -> list[LayerStore]:
        """Windows and codes of the compressed layers, once they hold a token."""
        return [layer.store for layer in self.compressed if layer.store is not None]

    @property
    def gap(self) -> int:
        """By how much the position of the next token exceeds the number of tokens; 0 in steps, which know positions."""
        return self.sequences.gap if self.passes.step is None else 0

    def placed(self, positions: Tensor | None, mask: Tensor | None, count: int, device: torch.device) -> Tensor:
        """Positions of `count` new slots behind documents side by side, [batch, count].

        Given ones [batch or 1, count] that count a row's tokens, as transformers' `generate` does, are moved by `gap`.
        """
        lengths = torch.tensor(self.sequences.lengths, device=device).unsqueeze(1)
        if positions is None and mask is not None and mask.ndim == 2:
            positions = (mask.cumsum(1) - 1)[:, -count:]
        elif positions is None:
            positions = lengths + torch.arange(count, device=device)
        counted = (positions == lengths).any(-1, keepdim=True)
        return (positions + self.gap * (counted & (positions >= lengths))).clamp(min=0)

    def step_obstacle(self, width: int = 1) -> str | None:
        """Why passes of so many tokens cannot count on the device (`kvcli.cache.step`); None if they can."""
        others, config = self.other_layers, self._seam.model.config.get_text_config(decoder=True)
        if others and width > 1:
            return "layers of other kinds than full attention take part in steps of one token; choose passes"
        if others and (not can_be_static(others) or "chunked_attention" in layer_kinds(config)):
            return "layers whose states grow, or start anew, cannot take part in steps; choose passes"
        if len(self._seam.devices) > 1:
            return "layers on several devices cannot take part in steps; choose passes"
        if self.sequences.rope.switch is not None:
            return "rotations that depend on the length of a text cannot take part in steps; choose passes"
        return None if self.sequences.is_text else "texts with images cannot take part in steps; choose passes"

    @property
    def can_step(self) -> bool:
        """Whether steps can follow: every row holds codes, and windows of other layers are full."""
        return self.sequences.counts.all_have_codes and windows_are_full(self.other_layers, self.sequences.lengths)

    def __bool__(self) -> bool:
        """Whether it holds tokens: `generate` of Phi-3 drops one that does where the prompt is longer."""
        return bool(self.sequences.lengths)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots seen so far, padding included."""
        return self.sequences.slots

    @untraced
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """What `CompressedLayer.update` returns; a compiled model calls it as it is, whichever the layer is."""
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """Forgets all tokens."""
        self._hold(self._new_sequences())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the rows for beam search, [batch] indices."""
        self.sequences.select(beam_idx)
        for store in self._stores:
            rows = beam_idx.to(store.keys.device)
            store.map(partial(torch.index_select, dim=0, index=rows))
        for layer in self.other_layers:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows: indices, or a boolean [batch]."""
        rows = torch.as_tensor(indices)
        self.reorder_cache(rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row."""
        self.reorder_cache(torch.arange(len(self.sequences.lengths)).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Called by transformers before it drafts tokens; raises CacheError where they could not be removed again."""
        self._check_only_full_attention("drafted tokens cannot be removed again")
        self.sequences.check_rollback()
        self._drafts = True

    @property
    def is_croppable(self) -> bool:
        """Whether tokens are drafted: else, no rollback, which cannot bring back the precision of what was encoded."""
        return self._drafts

    def crop(self, tokens_to_remove: int, end: EndOfPass | None = None) -> None:
        """Removes the last tokens: a negative count of slots; a positive one is the length to keep, as before 5.18.

        Args:
            end: that of the pass which made the last token that stays, where layers keep states of the whole text.

        Raises:
            CacheError: more than the cache holds, part of a group that was encoded together, or some but not all of
                the tokens that a codec's state was computed from; nothing has changed then.
        """
        slots = -tokens_to_remove if tokens_to_remove <= 0 else self.sequences.slots - tokens_to_remove
        if slots <= 0:
            return
        if slots > self.sequences.slots:
            raise CacheError(f"cannot remove {slots} tokens from a cache of {self.sequences.slots}")
        if (end is None or end.slots != self.sequences.slots - slots) and own_bytes([*self._others.values()]):
            self._check_only_full_attention("tokens cannot be removed")
        self.passes.check_complete()
        emptied = self.sequences.crop(slots)
        if end is not None and self.spec.other_layers:
            for layer_idx, layer in enumerate(DynamicCache(config=self._seam.model.config).layers):
                if layer_idx in self._others:
                    self.layers[layer_idx] = layer
            self._restore_others(take_states(dict(end.tensors)))
        for store in self._stores:
            store.codec.key.reset_state(store.state, emptied)

    def snapshot(self, device: torch.device | str | None = "cpu", end: EndOfPass | None = None) -> Snapshot:
        """A copy of the content on a device, or of one row a view; up to the end of an earlier pass, if one is given.

        CacheError: it is empty, a pass broke off, or it cannot be cut there.
        """
        self._check_on_one_device("saved")
        self.passes.check_at_rest()
        taken = take(self.sequences, self._stores, device)
        return (self.end_of_pass(device) if end is None else end).added_to(
            taken if end is None else taken.prefix(end.slots)
        )

    def end_of_pass(self, device: torch.device | str | None = None) -> EndOfPass:
        """Copies of what the layers of transformers' own hold now."""
        new = DynamicCache(config=self._seam.model.config).layers if self.spec.other_layers else []
        return EndOfPass(self.sequences.slots, states_of(self._others, new, device))

    @property
    def _others(self) -> dict[int, Any]:
        """The layers of transformers' own by their index in the model."""
        return {i: layer for i, layer in enumerate(self.layers) if not isinstance(layer, CompressedLayer)}

    def _restore_others(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        (device,), others = self._seam.devices, self._others
        if not states.keys() <= others.keys():
            raise CacheError(f"there are states of layers {[*states]}, but the model has such layers {[*others]}")
        for layer_idx, values in states.items():
            fill(others[layer_idx], values, len(self.sequences.lengths), device)

    def restore(self, snapshot: Snapshot, release: bool = False) -> None:
        """Fills an empty cache with what one of this model, method, settings and codecs held; `release` empties that.

        Raises:
            CacheError: the cache is not empty, or its codecs cannot have made the snapshot; nothing has changed then.
        """
        self._check_on_one_device("restored")
        if self.sequences.lengths:
            raise CacheError(f"the cache holds {self.sequences.slots} tokens; restore into a new one")
        sequences = self._new_sequences()
        sequences.rope = self.sequences.rope
        (device,) = self._seam.devices
        snapshot = snapshot if release else Snapshot(snapshot.counts, dict(snapshot.tensors))
        states = take_states(snapshot.tensors)
        stores = put(snapshot, sequences, self._codecs, device, release=True)
        self._hold(sequences)
        self._restore_others(states)
        for layer, store in zip(self.compressed, stores, strict=True):
            layer.store, layer.is_initialized = store, True

    def context(
        self, input_ids: Tensor | None = None, notes: Mapping[str, Any] | None = None, copy: bool = True
    ) -> Context:
        """A copy of the content with what it depends on, to be saved; not `copy`: see `snapshot` without a device.

        Args:
            input_ids: the tokens that the cache holds, int64 [batch, slots]; a cache does not know them.

        Raises:
            CacheError: the cache is empty, a pass over it broke off, or as for `identity`.
        """
        identity = self.identity()
        return Context(self.snapshot("cpu" if copy else None), identity, input_ids, notes or {})

    def identity(self) -> CacheIdentity:
        """What its tokens depend on; CacheError: no session made it, or the model computes otherwise since then."""
        if self._identity is None:
            raise CacheError("this cache was not made by a session, so it cannot be told what it depends on")
        if self.adapters is None:
            raise CacheError(
                "the active adapters changed while the cache was read, or are of rows; read again with one"
            )
        if not self.sequences.is_text:
            raise CacheError("a text with images is gone on from in its own cache alone, which cannot be stored")
        return replace(self._identity(), rope=self.sequences.rope.frequencies())

    def save(self, path: str | Path, input_ids: Tensor | None = None) -> None:
        """Writes the cache to one safetensors file, from which `Session.load_cache` goes on; see `Context.save`.

        Arguments and errors are those of `context` and `Context.save`.
        """
        self.context(input_ids).save(path)

    def _check_only_full_attention(self, refused: str) -> None:
        """Raises CacheError for layers whose state cannot be cut."""
        if count := self.spec.other_layers:
            raise CacheError(f"{refused}: {count} layers of the model keep a state of the whole text")

    def _check_on_one_device(self, done: str) -> None:
        """Raises CacheError for layers on several devices."""
        if len(self._seam.devices) > 1:
            names = ", ".join(sorted(map(str, self._seam.devices)))
            raise CacheError(f"a cache of layers on several devices ({names}) cannot be {done}")

    def memory(self) -> MemoryReport:
        """Measures the cache from its live tensors."""
        counts, stores = self.sequences.counts, self._stores
        keys = sum(store.key_codes.nbytes(counts.keys.coded) for store in stores)
        values = sum(store.value_codes.nbytes(counts.values.coded) for store in stores)
        window = sum(sum(counts.window) * x[0, :, 0].nbytes for store in stores for x in (store.keys, store.values))
        buffers = [x for s in stores for x in (s.keys, s.values, s.key_codes.codes, s.value_codes.codes)]
        state = sum(store.state.nbytes for store in stores if store.state is not None)

        heads = len(stores) * self.spec.num_kv_heads
        share = self._compressed_layers / len(self._codecs)  # the other codecs store 16 bits
        nominal_key, nominal_value = self.method.nominal_bits(self.spec, self.config)
        num_tokens = sum(self.sequences.lengths)
        fp16_bytes = num_tokens * self.spec.fp16_bytes_per_token()
        return MemoryReport(
            num_tokens=num_tokens,
            num_encoded=sum(counts.keys.coded),
            code_bytes=keys + values,
            window_bytes=window,
            position_bytes=self.sequences.nbytes,
            state_bytes=state,
            allocated_bytes=sum(x.nbytes for x in buffers) + state + self.sequences.nbytes,
            artifact_bytes=sum(codec.fitted_bytes() for codec in self._codecs),
            fp16_bytes=fp16_bytes,
            uncompressed_bytes=fp16_bytes * self._seam.model.dtype.itemsize // 2,
            key_bits=bits_per_value(keys, sum(counts.keys.coded) * heads * self.spec.head_dim),
            value_bits=bits_per_value(values, sum(counts.values.coded) * heads * self.spec.value_dim),
            nominal_bits=(nominal_key * share + 16 * (1 - share), nominal_value * share + 16 * (1 - share)),
            layers=self._compressed_layers,
            other_layers=self.spec.other_layers,
            other_bytes=own_bytes(self.other_layers),
        )


def own_bytes(layers: Iterable[Any]) -> int:
    """Bytes of the keys, values and states that transformers' own layers of a cache hold."""
    tensors = (x for layer in layers for x in tree_leaves(vars(layer)) if isinstance(x, Tensor))
    return sum(x.nbytes for x in tensors if x.is_floating_point())
