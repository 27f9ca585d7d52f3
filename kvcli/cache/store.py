"""The keys and values of one layer: window tokens in full precision, all others as codes.

`TokenCounts` counts; this module moves tensors as a `FlushPlan` says. Rows of a batch may have different lengths. This
module does not know about attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcli.cache.code_buffer import CodeBuffer
from kvcli.cache.counts import Encoding
from kvcli.cache.forward import Forward, ordinary_tensors
from kvcli.cache.ranges import Note
from kvcli.cache.window import WindowLayout
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Unrotate


class LayerStore:
    """Window and codes of one layer; made with the first tokens.

    Args:
        codec: encodes keys and values.
        key: first keys, [batch, num_kv_heads, query_len, head_dim].
        value: first values, like key.
        layout: of the window buffers.

    Attributes:
        keys: window of the keys after RoPE, [batch, num_kv_heads, capacity, head_dim], laid out as `layout` says.
        values: window of the values, like keys.
        key_codes: of the encoded keys.
        value_codes: of the encoded values.
        state: what the key codec keeps of each row, if anything.
    """

    def __init__(self, codec: LayerCodec, key: Tensor, value: Tensor, layout: WindowLayout) -> None:
        self.codec, self.layout = codec, layout
        self.keys, self.values = (x.new_zeros(*x.shape[:2], layout.capacity, x.shape[3]) for x in (key, value))
        self.key_codes = CodeBuffer(codec.key, self.keys)
        self.value_codes = CodeBuffer(codec.value, self.values)
        self.state = codec.key.new_state(key.shape[0], key.device)

    def reserve(self, forward: Forward) -> None:
        """Makes room for new tokens in the windows, and for the codes of those that are encoded."""
        plan = forward.plan
        if plan.layout != self.layout:
            self._lay_out(plan.layout, forward.held_before)
        for codes, encodings in ((self.key_codes, plan.keys), (self.value_codes, plan.values)):
            codes.reserve(max((encoding.stop for encoding in encodings if isinstance(encoding.stop, int)), default=0))

    def observes(self, forward: Forward) -> bool:
        """Whether `observe` has something to pass on: the key codec keeps a state, and a row has no codes yet."""
        return self.state is not None and not all(forward.plan.coded_keys)

    def observe(self, queries: Tensor, keys: Tensor, forward: Forward) -> None:
        """Passes new tokens of the rows that have no codes yet to the key codec, where `observes` says so.

        Args:
            queries: [batch, num_heads, query_len, head_dim] in the codec's query space.
            keys: [batch, num_kv_heads, query_len, head_dim] after RoPE.
            forward: the pass.
        """
        assert self.state is not None
        coded = forward.plan.coded_keys
        if forward.real is None and not any(coded):
            counts = torch.full((keys.shape[0],), float(keys.shape[2]), device=keys.device)
            self.codec.key.observe(self.state, queries, keys, counts)
            return
        open_rows = torch.tensor([not count for count in coded], device=keys.device)
        shown = open_rows[:, None, None, None]
        if forward.real is not None:
            shown = shown & forward.real[:, None, :, None]
        counts = torch.tensor(forward.counts, device=keys.device, dtype=torch.float32) * open_rows
        self.codec.key.observe(self.state, queries * shown, keys * shown, counts)

    def encode_keys(self, forward: Forward, unrotate: Unrotate, note: Note) -> None:
        """Encodes keys of the window where `reserve` made room; those that stay there become what they decode to.

        Args:
            forward: names rows and tokens.
            unrotate: inverse RoPE.
            note: called with what was encoded.
        """
        for i, encoding in enumerate(forward.plan.keys):
            rotation = forward.key_rotations(self.codec)[i] if self.codec.needs_rotations else None
            keys = self._take(self.keys, encoding)
            if rotation is not None:
                keys = self.codec.encoder_input(keys, rotation, unrotate)
            state = self.state
            if state is not None:
                if isinstance(encoding.start, int) and not encoding.start:
                    self.codec.key.finalize_state(state, encoding.rows)
                state = state if encoding.whole else state.select(encoding.rows)
            codes = self.key_codes.write(keys, state, encoding)
            note(encoding, keys, codes)
            if encoding.kept:
                kept = None if rotation is None else rotation.last(encoding.kept)
                last = codes.slice(encoding.count - encoding.kept, encoding.count)
                self._replace(self.keys, encoding, self.codec.decode_keys(last, state, kept, self.keys.dtype))

    def encode_values(self, forward: Forward, note: Note) -> None:
        """As `encode_keys`, for values."""
        for encoding in forward.plan.values:
            if encoding.kept and self._round_in_place(encoding):
                continue
            values = self._take(self.values, encoding)
            codes = self.value_codes.write(values, None, encoding)
            note(encoding, values, codes)
            if encoding.kept:
                last = codes.slice(encoding.count - encoding.kept, encoding.count)
                self._replace(self.values, encoding, self.codec.value.decode_to(last, None, self.values.dtype))

    def shrink(self, forward: Forward) -> None:
        """Gives back the memory of the window that a long prompt took, after the flush."""
        if forward.plan.layout_after != self.layout:
            self._lay_out(forward.plan.layout_after, forward.held_after)

    def restart(self, rows: list[int]) -> None:
        """Empties the codec's state of some rows."""
        if self.state is not None:
            self.codec.key.reset_state(self.state, rows)

    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows, [count] indices."""
        rows = rows.to(self.keys.device)
        self._map(lambda x: x.index_select(0, rows))

    def to(self, device: torch.device | str) -> None:
        """Moves all tensors."""
        self._map(lambda x: x.to(device, non_blocking=True))

    def _round_in_place(self, encoding: Encoding) -> bool:
        """Encodes values that stay in the window by one kernel, if there is one and the device knows which they are."""
        if not isinstance(encoding.start, Tensor):
            return False
        value, codes = self.codec.value, self.value_codes.codes
        return value.round_in_place(self.values, self.layout.sinks, encoding.start, encoding.count, codes)

    def _take(self, window: Tensor, encoding: Encoding) -> Tensor:
        """The tokens of an encoding, [rows, num_kv_heads, count, head_dim]."""
        first = self.layout.sinks + encoding.start
        if isinstance(first, Tensor):
            return self.layout.gathered(window, first, encoding.count)
        return self.layout.take(window, first, first + encoding.count, encoding.index)

    def _replace(self, window: Tensor, encoding: Encoding, tokens: Tensor) -> None:
        """Overwrites those tokens of an encoding that stay, [rows, num_kv_heads, kept, head_dim]."""
        first = self.layout.sinks + encoding.stop - encoding.kept
        if isinstance(first, Tensor):
            self.layout.scatter(window, first, tokens)
        else:
            self.layout.put(window, first, tokens, encoding.index)

    @ordinary_tensors
    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.keys, self.values = function(self.keys), function(self.values)
        for codes in (self.key_codes, self.value_codes):
            codes.codes = codes.codes.map(function)
        if self.state is not None:
            self.state = self.state.map(function)

    @ordinary_tensors
    def _lay_out(self, layout: WindowLayout, held: Tensor) -> None:
        """Changes the layout of windows that hold tokens `held` [batch, count]."""
        self.keys, self.values = (self.layout.moved(x, held, layout) for x in (self.keys, self.values))
        self.layout = layout
