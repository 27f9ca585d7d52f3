"""The fenced blocks of README and docs, and the command lines in them."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import dropwhile, groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")), *ROOT.glob("docs/*.md")]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STARTERS = ("torchrun", "python", "python3")


class Block(NamedTuple):
    """A block of a page, whose path is relative to the project."""

    page: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    """All blocks of programs or commands; a block without a language is a drawing."""
    for page in sorted(PAGES):
        for language, text in _BLOCK.findall(page.read_text()):
            if language:
                yield Block(str(page.relative_to(ROOT)), language, text)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without what the shell does: comments, variables, assignments."""
    text = re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", block.text.replace("\\\n", " "))
    pending = ""
    for line in text.splitlines(keepends=True):
        if block.language == "console" and not pending and not line.startswith("$ "):
            continue  # what a command prints
        pending += line if pending or block.language != "console" else line.removeprefix("$ ")
        with suppress(ValueError):  # a quotation goes on in the next line
            yield from _split(pending)
            pending = ""
    assert not pending


def inline(page: Path) -> Iterator[list[str]]:
    """The command lines of kvcli and research in the prose of a page, without placeholders at their end."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for text in re.findall(r"`((?:kvcli|python -m research) [^`]+)`", prose):
        yield from _split(" ".join(text.split()))


def _split(text: str) -> Iterator[list[str]]:
    """The words of commands between `&&`; ValueError: a quotation is open."""
    splitter = shlex.shlex(text, posix=True, punctuation_chars="&")
    splitter.whitespace_split = True
    for run, words in groupby(splitter, "&&".__ne__):
        command = [*dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)]
        if run and command:
            yield command[command.index("-m") + 1 :] if command[0] in _STARTERS and "-m" in command else command
