"""Compresses a text as a user does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from console import result

WINDOW = ("--residual-length", "8", "--sink-length", "2")
GROUPED = (*WINDOW, "--setting", "group_size=8")
METHOD = ("--method", "kivi-2", *GROUPED)
SHORT = ("--max-new-tokens", "12", "--json")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom"


def compressed(*arguments: str, text: str = TEXT, chunk: int = 32) -> dict[str, Any]:
    Path("text.txt").write_text(text)
    options = ("--prompt-file", "text.txt", "--out", "c.safetensors", "--prefill-chunk", str(chunk), "--json")
    made: dict[str, Any] = result("compress", *options, *arguments)
    return made
