"""Headers of safetensors files: read as the library reads them, and refused where it refuses them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcli.storage.tensors import _DTYPES, SafetensorsHeader


@pytest.mark.parametrize("dtype", _DTYPES.values())
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)])
def test_views_are_the_tensors(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    path, x = tmp_path / "f", torch.ones(shape).to(dtype)
    save_file({"x": x, "odd": torch.ones(3, dtype=torch.uint8), "": torch.zeros(2)}, path, metadata={"a": "b"})
    header = SafetensorsHeader.read(path)
    views = header.views(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)[header.nbytes :])
    assert header.metadata == {"a": "b"}
    assert (views["x"].dtype, views["x"].shape) == (dtype, shape)
    assert views["x"].float().tolist() == x.float().tolist()
    assert views["odd"].tolist() == [1, 1, 1]


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
ODD: dict[str, list[Any]] = {
    "dtype": ["F7", []],
    "shape": [[-2], [-1, -2], [2.0], [True, 2], 2, [3]],
    "data_offsets": [[0, 4], [8, 16], [-8, 0], [0, 8, 16]],
}


@pytest.mark.parametrize(
    "values",
    [
        *([], 3, {"x": 3}, {"x": {}}),
        *({"x": {**TENSOR, field: value}} for field, values in ODD.items() for value in values),
        {"x": TENSOR, "y": TENSOR},
        {"x": TENSOR, "y": {**TENSOR, "data_offsets": [4, 12]}},
        {"x": TENSOR, "__metadata__": 3},
        {"x": TENSOR, "__metadata__": {"a": 3}},
    ],
)
def test_odd_headers_are_refused(tmp_path: Path, values: Any) -> None:
    path, text = tmp_path / "f", json.dumps(values).encode()
    with pytest.raises(ValueError, match=r"."):
        SafetensorsHeader.parse(text)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(Exception, match=r"."), safe_open(path, framework="pt") as handle:
        pytest.fail(f"the library reads it: {handle.keys()}")


@pytest.mark.parametrize("content", [b"", b"1234567", bytes(8), b"\xff" * 20, b"\5" + bytes(7) + b"[[[[["])
def test_files_of_others_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        SafetensorsHeader.read(tmp_path / "f")


def test_numbers_that_begin_anywhere_are_refused() -> None:
    first = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = SafetensorsHeader.parse(json.dumps({"a": first, "b": {**TENSOR, "data_offsets": [1, 9]}}).encode())
    with pytest.raises(ValueError, match="its header is damaged"):
        header.views(torch.zeros(9, dtype=torch.uint8))
