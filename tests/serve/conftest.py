"""Sessions of every method, stores with small blocks, and a server of each engine."""

from collections.abc import Iterator

import pytest
from contexts_made import maker, store  # noqa: F401
from served import Served, serving, serving_together


@pytest.fixture(scope="module", params=[serving_together, serving])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of codes for the tests that leave it as it was; modules may have another."""
    with request.param() as made:
        yield made
