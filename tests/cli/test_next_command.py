"""What a command says to type next."""

from __future__ import annotations

from typing import Any

import pytest

from kvcli.cli.next_command import next_command

ROWS = {"rows": [{"method": "fp16"}, {"method": "kivi-2"}]}


def compressed(*evicted: str) -> dict[str, Any]:
    made = [{"context": name, "evicted": []} for name in ("a", "b")]
    made[1]["evicted"] = [*evicted]
    return {"store": "s", "contexts": made}


@pytest.mark.parametrize(
    ("name", "options", "record", "expected"),
    [
        ("compress", {"store": None}, compressed(), "kvcli generate m --context a --prompt 'In short,'"),
        ("compress", {"store": "s"}, compressed("a"), "kvcli generate m --context b --store s --prompt 'In short,'"),
        ("compress", {"store": None}, compressed("a", "b"), ""),
        ("chat", {"store": "s"}, {"saved": "talk"}, "kvcli chat m --store s --resume talk"),
        ("chat", {"store": None}, {"saved": None}, ""),
        ("bench", {"suite": "generate", "random_weights": None}, ROWS, "kvcli eval m --method kivi-2"),
        ("bench", {"suite": "generate", "random_weights": "tiny"}, ROWS, "kvcli eval --method kivi-2"),
        ("bench", {"suite": "attention", "random_weights": None}, ROWS, "kvcli eval --method kivi-2"),
    ],
)
def test_it_is_of_what_was_just_done(name: str, options: dict[str, Any], record: dict[str, Any], expected: str) -> None:
    assert next_command(name, {"model": "m", **options}, record) == expected
