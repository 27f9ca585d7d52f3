"""The tiny model of random weights that the suites of whole models run on."""

from typing import Any

import pytest
import torch

from kvcli.bench.model import random_model


@pytest.fixture(scope="session")
def model() -> Any:
    return random_model("tiny", None, torch.device("cpu"), torch.float32, 0)
