"""The command line with a tiny model, in a process of its own; `DIE_IN` names a function whose second call ends it."""

import importlib
import logging
import os
import signal
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns while it is imported
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

from byte_tokenizer import byte_tokenizer  # noqa: E402
from factories import load, make_model  # noqa: E402

from kvcli.cli.start import main  # noqa: E402
from kvcli.models import load as models  # noqa: E402

TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
TINY = replace(load(make_model("llama", num_hidden_layers=4, vocab_size=260)), tokenizer=TOKENIZER)


def dying(function: Any) -> Any:
    calls = count(1)

    def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return called


def command_line() -> None:
    torch.set_num_threads(1)
    models.load_model = lambda *_, **__: TINY
    if os.environ.get("RANK") == os.environ.get("DYING_RANK", "none"):
        module, name = os.environ["DIE_IN"].split(":")
        found = importlib.import_module(module)
        setattr(found, name, dying(getattr(found, name)))
    main()


def in_folder(folder: Path, arguments: tuple[str, ...], variables: dict[str, str], said: tuple[Path, Path]) -> None:
    """The command line of a forked process; what it says goes into two files."""
    os.chdir(folder)
    os.environ.update(variables)
    for handle, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), handle)
    sys.argv[1:] = arguments
    command_line()


if __name__ == "__main__":
    command_line()
