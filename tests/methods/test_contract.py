"""The laws of codecs, on every method of the registry."""

import pytest
from contract import CodecContract

from kvcli.methods.method import Method
from kvcli.registry import METHODS, get_method


class TestRegistry(CodecContract):
    """A new method is tested here as soon as it has its line in the registry."""

    @pytest.fixture(params=METHODS)
    def method(self, request: pytest.FixtureRequest) -> Method:
        """One method after another."""
        return get_method(request.param)
