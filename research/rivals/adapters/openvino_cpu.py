"""OpenVINO's CPU plugin, on the model that OpenVINO GenAI makes of the GGUF file.

It does not tell the bytes of its cache: a state is handed out as float32, whatever its precision.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from research.rivals.engines import EngineSetting
from research.rivals.protocol import Job

QUANTIZED = "KEY_CACHE_QUANT_ALG", "VALUE_CACHE_QUANT_ALG"


@functools.cache
def converted(folder: Path) -> Path:
    """The model as OpenVINO reads it, beside a link to its GGUF file."""
    place = folder / "openvino"
    if not (place / "openvino_model.xml").exists():
        place.mkdir(exist_ok=True)
        gguf = place / "model.gguf"
        gguf.unlink(missing_ok=True)
        gguf.symlink_to(folder / "model.gguf")
        openvino_genai.LLMPipeline(str(gguf), "CPU", enable_save_ov_model=True)
    return place / "openvino_model.xml"


class Reader:
    """A request with its state; products are in float32."""

    def __init__(self, job: Job, **options: Any) -> None:
        core, fixed = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        self.request = core.compile_model(converted(job.folder), "CPU", {**fixed, **options}).create_infer_request()
        self.place = 0

    def read(self, tokens: list[int]) -> Any:
        """Logits of all tokens."""
        start, self.place = self.place, self.place + len(tokens)
        inputs = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, self.place), np.int64),
            "position_ids": np.arange(start, self.place)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self.request.infer(inputs)
        return self.request.get_output_tensor(0).data[0].copy()

    def held(self) -> None:
        """It does not tell."""


def stock(job: Job) -> Reader:
    """Keys and values in float32."""
    return Reader(job, KV_CACHE_PRECISION="f32")


def options(bits: str, algorithm: str = "") -> Any:
    """Keys and values of one precision."""
    chosen = dict.fromkeys(QUANTIZED, algorithm) if algorithm else {}
    return functools.partial(Reader, KV_CACHE_PRECISION=bits, **chosen)


SETTINGS = [
    EngineSetting("u8", "8 bits", options("u8"), stock),
    EngineSetting("u4", "4 bits", options("u4"), stock),
    EngineSetting("u4, TURBO", "4 bits", options("u4", "TURBO"), stock),
    EngineSetting("u3, TURBO", "3 bits", options("u3", "TURBO"), stock),
]
