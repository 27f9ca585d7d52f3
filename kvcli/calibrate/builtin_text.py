"""The text that ships with kvcli: domains of several sources each, and the mixture of domains that is the default.

`calibration_data/manifest.json` says which domain a source belongs to. Some domains are held out as a whole, so that
codebooks can be measured on a kind of text that no default fit has seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcli.errors import CorpusError, suggestion

BUILTIN = "builtin"
SPLITS = ("calibration", "heldout")
MIXTURE = {"docs": 2.0, "prose": 1.0, "chat": 0.8, "code": 0.75, "maths": 0.35, "languages": 0.7, "keys": 0.15}
"""Domains of `builtin` and their shares of its characters. In tokens of SmolLM2: a quarter each of docs and languages,
an eighth each of prose, chat and code, a tenth of maths and a twentieth of keys."""

_EXCERPT_CHARACTERS = {"docs": 3000, "prose": 3000, "chat": 2400, "code": 2400, "maths": 1500}
_DENSE_EXCERPT_CHARACTERS = 1000
"""Excerpts of other domains, whose tokens are one or two characters long."""


def is_builtin(source: str) -> bool:
    """Whether a corpus name means text that ships with kvcli: `builtin`, or `builtin:` and a domain or source."""
    return source == BUILTIN or source.startswith(BUILTIN + ":")


def builtin_folder() -> Path:
    """The text that ships with kvcli: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "calibration_data", package.parent / "calibration_data"):
        if folder.is_dir():
            return folder
    raise CorpusError("calibration_data is missing from this installation; pass a corpus of your own with --corpus")


def domains(split: str | None = None) -> dict[str, tuple[str, ...]]:
    """Sources of each domain that has text in a split (default: any), in the order of the manifest."""
    grouped: dict[str, tuple[str, ...]] = {}
    for source in json.loads((builtin_folder() / "manifest.json").read_text(encoding="utf-8"))["sources"]:
        if split in (None, "heldout") or not source.get("heldout_only"):
            grouped[source["domain"]] = (*grouped.get(source["domain"], ()), source["name"])
    return grouped


def builtin_files(source: str, split: str) -> list[Path]:
    """Files of `builtin` (all of `MIXTURE`) or `builtin:NAME` (a domain or source) in a split, in alphabetical order.

    CorpusError: no such domain, source or split, or one that has no text in this split.
    """
    if split not in SPLITS:
        raise CorpusError(f"'{source}' has no split '{split}'; it has {' and '.join(SPLITS)}")
    grouped, name = domains(), source.removeprefix(BUILTIN).removeprefix(":")
    if source == BUILTIN:
        names = [member for domain in MIXTURE for member in grouped[domain]]
    elif name in grouped:
        names = list(grouped[name])
    elif name in (known := [member for members in grouped.values() for member in members]):
        names = [name]
    else:
        hint = suggestion(name, [*grouped, *known])
        raise CorpusError(f"no built-in text '{name}'{hint}; the domains are {', '.join(grouped)}")
    files = [builtin_folder() / split / f"{member}.jsonl" for member in sorted(names)]
    if not (files := [file for file in files if file.is_file()]):
        raise CorpusError(f"'{source}' is held out as a whole: it has no calibration text, only --corpus-split heldout")
    return files


def mixture(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Excerpts of all domains of `MIXTURE`, in turn, so that any beginning of the stream has about the same shares.

    Every document gives one excerpt before any gives its second. The order depends on the seed alone. Records have the
    fields `text` and `domain`.
    """
    streams = {}
    for domain in MIXTURE:
        size = _EXCERPT_CHARACTERS.get(domain, _DENSE_EXCERPT_CHARACTERS)
        streams[domain] = _excerpts(builtin_files(f"{BUILTIN}:{domain}", split), size, seed)
    characters = dict.fromkeys(MIXTURE, 0.0)
    while streams:
        domain = min(streams, key=lambda name: characters[name] / MIXTURE[name])
        text = next(streams[domain], None)
        if text is None:
            del streams[domain]
        else:
            characters[domain] += len(text)
            yield {"text": text, "domain": domain}


def _excerpts(files: list[Path], size: int, seed: int) -> Iterator[str]:
    """The first excerpt of every document, in random order, then the second of every document, and so on."""
    texts = []
    for file in files:
        with file.open(encoding="utf-8") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    random.Random(seed).shuffle(texts)
    while texts:
        rest = []
        for text in texts:
            end = len(text)
            if end > 1.5 * size:  # a short rest is not left over
                line = text.rfind("\n", size // 2, size)  # after a line, if one ends in the second half
                end = line + 1 if line >= 0 else size
            yield text[:end].strip("\n")
            if remainder := text[end:].strip("\n"):
                rest.append(remainder)
        texts = rest
