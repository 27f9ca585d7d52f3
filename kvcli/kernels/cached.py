"""Values computed once from fitted tensors, for kernels. This module does not import Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

ValueT = TypeVar("ValueT")


class CachedFromBuffers(Generic[ValueT]):
    """What was computed from some tensors, and is computed again when one of them was replaced, moved or written to."""

    def __init__(self) -> None:
        self._known: tuple[tuple[tuple[object, ...], ...], ValueT] | None = None

    def get(self, make: Callable[[], ValueT], *sources: Tensor) -> ValueT:
        """The value of `make()`, a function of `sources`."""
        stamp = tuple(_stamp(source) for source in sources)
        if self._known is None or self._known[0] != stamp:
            self._known = (stamp, make())
        return self._known[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held at present."""
        value = self._known[1] if self._known is not None else None
        held = [value] if isinstance(value, Tensor) else vars(value).values() if value is not None else []
        return sum(x.nbytes for x in held if isinstance(x, Tensor))


def _stamp(x: Tensor) -> tuple[object, ...]:
    """What changes with a tensor's content; tensors made in inference mode do not count their changes."""
    return x.data_ptr(), x.device, x.shape, 0 if x.is_inference() else x._version
