"""The command line with a tiny model, in a process of its own; `DIE_IN` names a function whose second call ends it."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from dataclasses import replace
from typing import Any

from kvcli.cli.start import main


class Words:
    """A tokenizer: every character is a token."""

    eos_token_id = pad_token_id = 0
    bos_token_id = 1

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 90 for c in text]}


def dying(function: Any) -> Any:
    calls: list[int] = []

    def called(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return called


if __name__ == "__main__":
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns while it is imported
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    from factories import load, make_model

    from kvcli import models

    tiny = replace(load(make_model("llama", num_hidden_layers=4)), tokenizer=Words())  # type: ignore[arg-type]
    models.load_model = lambda *_, **__: tiny
    if os.environ.get("RANK") == os.environ.get("DYING_RANK", "none"):
        module, name = os.environ["DIE_IN"].split(":")
        found = importlib.import_module(module)
        setattr(found, name, dying(getattr(found, name)))
    main()
