"""A model of transformers whose keys and values lie in pages: tokens of several requests are one row of a pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.attach import attach
from kvcli.attention.graphs import Graphs
from kvcli.attention.session import Session
from kvcli.cache.ranges import StepRanges
from kvcli.cache.window import WindowLayout, WindowTokens
from kvcli.errors import CacheError, UnsupportedModelError, UsageError
from kvcli.models.load import LoadedModel
from kvcli.paged.attention import Page, PagedAttention
from kvcli.paged.batch import Batch, most_rows
from kvcli.paged.captured import MOST_GRAPHS, CapturedPasses
from kvcli.paged.pages import LayerEncoder, check_codecs
from kvcli.paged.requests import PassInputs, ScheduledRequest
from kvcli.paged.rings import RESIDUAL_LENGTH, AssignedRings
from kvcli.progress import Progress, no_progress
from kvcli.rope import NoRope
from kvcli.seam.decoder import find_decoder
from kvcli.seam.layer import AttentionCall, LayerAttention, untraced
from kvcli.seam.patch import Seam
from kvcli.seam.recorder import OwnLayer
from kvcli.seam.trial import TOLERANCE
from kvcli.seam.versions import cache_of, with_cache

PAGE_SIZE = 128
"""Tokens of a page: a multiple of all groups of keys that methods have by default."""

_TRIAL = (9, 5, 2)
"""New tokens of three requests in the pass that shows whether a model keeps them apart."""


class PagedTokens(NamedTuple):
    """What the cache's `update` returns in place of keys: new keys before RoPE, [1, num_kv_heads, tokens, head_dim]."""

    key: Tensor


class _PagedLayer(OwnLayer):
    """Hands new tokens to the attention."""

    def __init__(self, attention: LayerAttention) -> None:
        super().__init__()
        self._attention = attention

    @untraced
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Takes keys before RoPE."""
        self.is_initialized = True
        return PagedTokens(self._attention.in_order(key_states)), value_states

    def get_seq_length(self) -> int:
        """None: a pass says all positions, and attention needs no mask."""
        return 0


class PagedModel:
    """A model with pages of codes; it is patched from `open` to `close`.

    Args:
        session: of the model and a method, detached.
        max_bytes: of all pages; there are fewer where `num_rings` requests of `max_length` tokens need fewer.
        num_rings: requests of a pass at most.
        max_length: tokens of a request at most.
        residual_length: recent tokens of a request that are exact.
        page_size: tokens of a page.

    Attributes:
        page_bytes: of a page, over all layers.
        num_pages: that requests may be given, from 0 on.
        max_length: as given, or of all pages.
        layout, pages: of each layer, how its pages are laid out, and these, uint8 [num_pages + 1, bytes].
        captured: makes passes on a GPU with kernels, once it is open; None: they are not captured.
        vocab_size: logits of a token.
        device: of the model.

    Raises:
        UsageError: pages that groups of keys do not divide, or less memory than one takes.
        UnsupportedModelError: layers without full attention, values of another width than keys, a rotation that depends
            on the length of a text, layers on several devices, or a model that mixes the tokens of a row otherwise than
            by attention.
    """

    def __init__(
        self,
        session: Session,
        max_bytes: int,
        num_rings: int,
        max_length: int,
        residual_length: int = RESIDUAL_LENGTH,
        page_size: int = PAGE_SIZE,
    ) -> None:
        self.session, self.num_rings = session, num_rings
        self.page_size, self.residual_length = page_size, residual_length
        spec, model = session.spec, session.model
        self.vocab_size = spec.vocab_size
        if spec.other_layers:
            raise UnsupportedModelError(
                "layers without full attention, such as a sliding window, have no codes in pages"
            )
        if "position_ids" not in signature(find_decoder(model).forward).parameters:
            raise UnsupportedModelError("pages need a model that is given the positions of tokens")
        if session.rope.switch is not None:
            raise UnsupportedModelError("pages need a rotation that does not depend on the length of a text")
        self._seam = Seam(model, self._attend, self._check_call)
        if len(self._seam.devices) != 1:
            raise UnsupportedModelError("pages of a model on several devices are not supported")
        (self.device,) = self._seam.devices
        self._sinks = session.config.sink_length
        self._ranges = StepRanges(2 * len(session.codecs), self.device)
        self._encoders = [
            LayerEncoder(x, i, model.dtype, self._ranges, session.backend.unrotate)
            for i, x in enumerate(session.codecs)
        ]
        self.layout = [Page(x, model.dtype, page_size, self._sinks) for x in self._encoders]
        self.page_bytes = sum(page.nbytes for page in self.layout)
        # and one that is nobody's, for what is not stored
        self.num_pages = min(max_bytes // self.page_bytes - 1, num_rings * -(-max_length // page_size))
        if self.num_pages < 1:
            raise UsageError(
                f"two pages, the fewest, take {2 * self.page_bytes} bytes, more than the {max_bytes} of all pages"
            )
        self.max_length = min(max_length, self.num_pages * page_size)
        zeros = partial(torch.zeros, device=self.device)
        self.pages = [zeros(self.num_pages + 1, page.nbytes, dtype=torch.uint8) for page in self.layout]
        self._kinds = [(x.codec.rotated, x.codec.key.tokens_per_group) for x in self._encoders]
        shape = 2, spec.num_kv_heads, spec.head_dim
        self._rings = [
            zeros(num_rings + 1, residual_length + group - 1, *shape, dtype=model.dtype) for _, group in self._kinds
        ]
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self.captured: CapturedPasses | None = None
        self._modules: Callable[[], AbstractContextManager[None]] = nullcontext
        self._batches: dict[tuple[bool, int], Batch] = {}
        self._cache = Cache(layers=[_PagedLayer(layer) for layer in self._seam.attention.layers])

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, with the one that is nobody's."""
        return (self.num_pages + 1) * self.page_bytes

    def open(self) -> None:
        """Patches the model, and runs it on a few tokens of three requests, together and apart."""
        self._seam.open()
        try:
            self._check_requests_are_apart()
            self._modules = self.session.fused_modules()
            if self.device.type == "cuda" and self.session.backend.impl == "fused":
                graphs = Graphs(self.device, True, MOST_GRAPHS)
                self.captured = CapturedPasses(self.capturable, self.page_size, self.num_rings, graphs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restores the model."""
        self.captured = None
        self._seam.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @torch.inference_mode()
    def run(self, requests: Sequence[ScheduledRequest], all_logits: bool = False) -> Tensor:
        """Reads new tokens; the logits of the last of each request, [requests, vocab_size].

        With `all_logits` those of all new tokens, [tokens, vocab_size], in a pass that is not captured.
        """
        if self.captured is not None and not all_logits:
            return self.captured(requests)
        return self._logits(PassInputs.of(requests, self.page_size, self.device), None, all_logits)

    def warm_up(self, longest: int, progress: Progress = no_progress) -> None:
        """Compiles kernels and captures passes of up to `longest` tokens before the first request; on a GPU."""
        if self.captured is None:
            return
        from kvcli.kernels.compiling import compiled_not_launched

        def request(count: int, past: int, ring: int = 1) -> ScheduledRequest:
            tokens = [(7919 * i + 11) % self.vocab_size for i in range(count)]
            return ScheduledRequest(tokens, past, 0, range(self.num_pages), ring)

        def run(count: int, rows: int = 1, earlier: Sequence[int] = (0, self.page_size)) -> None:
            for past in earlier:
                if past + count <= self.max_length:
                    self.run([request(count, past, row + 1) for row in range(rows)])

        lengths = (2 * self.page_size, self.page_size, self.page_size // 2)
        all_rows = sorted({min(2**i, self.num_rings) for i in range(self.num_rings.bit_length() + 1)})

        def all_kinds() -> None:
            run(longest, earlier=[0, *(self.page_size << i for i in range((self.num_pages - 1).bit_length()))])
            for count in lengths:
                run(count)
            for rows in all_rows:
                run(1, rows, [self.page_size])

        with compiled_not_launched(progress):
            self.captured.graphs.enabled = False
            all_kinds()
        self.captured.graphs.enabled = True
        all_kinds()
        self.range_error()  # of what was not computed

    def capturable(self, inputs: PassInputs) -> Tensor:
        """Logits [requests, vocab_size] of a pass with as many new tokens of each request."""
        # transformers takes a mask of four axes as it is; without one it makes one while a graph is captured
        with self._modules():
            return self._logits(inputs, self.num_pages, attention_mask=self._mask)

    def _logits(self, inputs: PassInputs, null_page: int | None, all_logits: bool = False, **others: Tensor) -> Tensor:
        spec, length = self.session.spec, inputs.block_table.shape[1] * self.page_size
        for rotated, group in {*self._kinds}:
            self._batches[rotated, group] = Batch.of(
                inputs.query_lens,
                inputs.seq_lens,
                inputs.block_table,
                inputs.slots,
                self._seam.rope if rotated else NoRope(spec.rope.rotary_dim, self.device),
                page_size=self.page_size,
                group=group,
                sinks=self._sinks,
                rings=AssignedRings(inputs.rings, inputs.first_exact, self.residual_length, group),
                null_page=null_page,
                most_rows=most_rows(length, spec.num_heads),
                has_codes=inputs.has_codes,
                fused=self.session.backend.impl == "fused",
            )
        logits: Tensor = self.session.model(
            input_ids=inputs.tokens.unsqueeze(0),
            position_ids=inputs.positions.unsqueeze(0),
            logits_to_keep=0 if all_logits else inputs.last,
            **others,
            **with_cache(self._cache),
        ).logits[0]
        kept = all_logits or len(logits) == len(inputs.last)
        return logits if kept else logits[inputs.last]  # of a model that keeps them all

    def range_error(self) -> CacheError | None:
        """What is wrong if passes since the last call had values beyond what codes hold."""
        try:
            self._ranges.check()
        except CacheError as error:
            return error
        return None

    def _attend(self, call: AttentionCall) -> Tensor:
        """Attention of the tokens of a pass, [1, tokens, num_heads, head_dim]."""
        if not isinstance(call.key, PagedTokens):
            return call.exact()
        i, query, key, value = call.layer.layer_idx, call.query, call.key.key, call.value
        if call.layer.rotated:
            new = WindowTokens(WindowLayout(0, key.shape[2]), key.shape[2], attended=0, index=0)
            key, value = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (key, value))
            unrotated = call.query, call.key.key, call.value
            query = self.session.backend.rotate_and_append(call.rotation, *unrotated, key, value, new)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        attention = PagedAttention(
            self._encoders[i], self.session.backends[i], call.scaling, self._rings[i], call.layer.soft_cap, call.sinks
        )
        attention(self.layout[i], self.pages[i], self._batches[self._kinds[i]], query, key, value, output)
        return output.unsqueeze(0)

    def _check_call(self, call: Mapping[str, Any]) -> None:
        """CacheError: a pass with a cache that is not this one."""
        if (cache := cache_of(call)) is not self._cache and (cache is not None or call["use_cache"]):
            raise CacheError("the model has pages: its passes are those of PagedModel.run, or have use_cache=False")

    def _check_requests_are_apart(self) -> None:
        """UnsupportedModelError: logits of requests depend on the others of a pass."""
        lengths = _TRIAL[: min(self.num_rings, self.num_pages)]
        texts = [[(7919 * (i + 31 * row) + 11) % self.vocab_size for i in range(n)] for row, n in enumerate(lengths)]
        requests = [ScheduledRequest(x, 0, 0, [row], row + 1) for row, x in enumerate(texts)]
        together = self.run(requests)
        apart = torch.cat([self.run([x]) for x in requests])
        self._ranges.check()
        if not (together - apart).norm() <= TOLERANCE.get(apart.dtype, 0.05) * apart.norm():
            raise UnsupportedModelError("pages need a model whose tokens see each other by attention alone")


@contextmanager
def open_pages(
    model: nn.Module | LoadedModel,
    choice: MethodChoice,
    *,
    attach: Callable[..., Session] = attach,
    impl: str = "auto",
    layers: Collection[int] | None = None,
    **sizes: Any,
) -> Iterator[PagedModel]:
    """A model with pages of codes, inside the block.

    Args:
        choice: `flush_block` as in `MethodChoice.for_pages`, and `residual_length` is 32 by default.
        attach: makes the session, as `kvcli.attach` does from the other arguments.
        impl, layers: as of `kvcli.attach`.
        sizes: `max_bytes`, `num_rings`, `max_length`, `page_size` of `PagedModel`.

    Raises:
        UsageError: a `flush_block` that was asked for.
        As `kvcli.attach`, `check_codecs` and `PagedModel`.
    """
    choice = choice.for_pages()
    with attach(model, choice, impl=impl, layers=layers) as session:
        check_codecs(choice.method, session.codecs)
    residual_length = int(choice.named.get("residual_length", RESIDUAL_LENGTH))
    with PagedModel(session, residual_length=residual_length, **sizes) as paged:
        yield paged
