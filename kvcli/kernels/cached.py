"""Values computed once from fitted tensors, for kernels. This module does not import Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

ValueT = TypeVar("ValueT")


class CachedFromBuffers(Generic[ValueT]):
    """A value computed from tensors, and computed again after one of them was replaced, moved or written to."""

    def __init__(self) -> None:
        self._cached: tuple[tuple[tuple[object, ...], ...], ValueT] | None = None

    def get(self, make: Callable[[], ValueT], *sources: Tensor) -> ValueT:
        """The value of `make()`, a function of `sources`."""
        versions = tuple(_version(source) for source in sources)
        cached = self._cached  # read once: another thread may replace it
        if cached is None or cached[0] != versions:
            cached = self._cached = (versions, make())
        return cached[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors: the value itself, or the tensors among its attributes."""
        value = self._cached[1] if self._cached is not None else None
        tensors = [value] if isinstance(value, Tensor) else vars(value).values() if value is not None else []
        return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


def _version(x: Tensor) -> tuple[object, ...]:
    """A key that changes when a tensor does; tensors made in inference mode have no version counter."""
    return x.data_ptr(), x.device, x.shape, 0 if x.is_inference() else x._version
