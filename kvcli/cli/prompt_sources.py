"""Prompts from flags, files, folders and standard input."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from kvcli.cli.output import Output
from kvcli.errors import UsageError

DEFAULT_PROMPT = "The water cycle is"
STANDARD_INPUT = Path("-")


@dataclass(frozen=True)
class Source:
    """A text or a conversation to be compressed.

    Attributes:
        name: fit for a file.
        text: what it says; of a conversation, JSON.
        is_conversation: whether it is one.
    """

    name: str
    text: str
    is_conversation: bool = False


def read_prompt(prompt: str | None, file: Path | None, output: Output) -> str:
    """The prompt from a flag, a file or standard input.

    Args:
        prompt: the flag.
        file: its name.
        output: says what is continued, if nothing was given.

    Raises:
        UsageError: both a flag and a file, a file that cannot be read, or text that is not UTF-8.
    """
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other")
    if prompt == str(STANDARD_INPUT):
        file = STANDARD_INPUT
    if file is not None:
        return _read(file).rstrip("\n")
    if prompt is None:
        output.say(f"no --prompt given: continuing '{DEFAULT_PROMPT}'")
        return DEFAULT_PROMPT
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("--prompt is not UTF-8 text") from error
    return prompt


def read_sources(files: list[Path], messages: Path | None) -> list[Source]:
    """Texts of files, of all files in folders, and of standard input; or one conversation.

    Args:
        files: texts; a folder stands for its files, without those whose name begins with a dot.
        messages: JSON file of a conversation.

    Raises:
        UsageError: nothing to read, both kinds, a file that cannot be read, is empty or not UTF-8 text, or two files
            of one name.
    """
    if bool(files) == (messages is not None):
        raise UsageError("give what is to be compressed with --prompt-file, or a conversation with --messages")
    if messages is not None:
        return [Source(_name(messages), _read(messages), True)]
    paths = [path for file in files for path in (_files_in(file) if file.is_dir() else [file])]
    sources = [Source(_name(path), _read(path).rstrip("\n")) for path in paths]
    for path, source in zip(paths, sources, strict=True):
        if not source.text:
            raise UsageError(f"{_shown(path)} is empty")
    names = [source.name for source in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two files are named {twice[0]}; compress them one by one")
    return sources


def parse_messages(source: Source) -> object:
    """The values of a conversation, to be checked.

    Raises:
        UsageError: no JSON.
    """
    try:
        return json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source.name}: the conversation is not JSON ({error})") from error


def _files_in(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if not files:
        raise UsageError(f"{folder} has no files")
    return files


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if path == STANDARD_INPUT else path.read_text()
    except UnicodeDecodeError as error:
        raise UsageError(f"{_shown(path)} is not UTF-8 text") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _shown(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


def _name(path: Path) -> str:
    return "stdin" if path == STANDARD_INPUT else path.stem
