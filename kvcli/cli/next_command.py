"""What to type after a command: the next step with the paths that the command has just written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcli.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL
from kvcli.registry import BASELINE, DEFAULT_METHOD, FIT_COMMANDS, METHODS, parse_method

PROMPT = "Photosynthesis is"
FOLLOW_UP = "In short,"


def next_command(name: str, options: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The next command line; empty where none follows.

    Args:
        name: the command that has ended.
        options: its options by name.
        record: its result.
    """
    words: list[Any] = []
    if name in ("calibrate", "merge"):
        # a share of a recording cannot be fitted
        words = ["kvcli", "fit", record["samples"]] if options.get("shard") is None else []
    elif name in ("fit", *FIT_COMMANDS):
        # a part of the layers makes no artifact yet
        words = ["kvcli", "export", record["run"]] if options["layers"] is None else []
    elif name in ("export", "demo"):
        model = _model_of(record["artifact"])
        words = ["kvcli", "generate", *model, "--artifact", record["artifact"], "--prompt", PROMPT, "--stats"]
    elif name == "generate" and options.get("context") is None:
        words = ["kvcli", "eval", *_unless_default(options["model"]), *_what(options["artifact"], record["method"])]
    elif name == "compress":
        where = _unless_default(options["model"]) if record["store"] else []
        store = ["--store", options["store"]] if options["store"] else []
        removed = {name for made in record["contexts"] for name in made["evicted"]}
        kept = [made["context"] for made in record["contexts"] if made["context"] not in removed]
        words = ["kvcli", "generate", *where, "--context", *kept[:1], *store, "--prompt", FOLLOW_UP] if kept else []
    elif name == "chat":
        where = [*_unless_default(options["model"]), *(["--store", options["store"]] if options["store"] else [])]
        words = ["kvcli", "chat", *where, "--resume", record["saved"]] if record["saved"] else []
    elif name == "eval":
        words = ["kvcli", "bench", "--method", _last_method(record["rows"])]
    elif name == "bench":
        # the other suites, and random weights, are of shapes
        own = options["suite"] in ("generate", "contexts") and options["random_weights"] is None
        words = _try(_last_method(record["rows"]), "eval", _unless_default(options["model"]) if own else [])
    elif name == "methods":
        words = _try(options["name"], "generate") if options["name"] else ["kvcli", "methods", DEFAULT_METHOD]
    elif name == "plan":
        model = options["model"]  # or a shape, of which there is nothing to calibrate
        words = ["kvcli", "calibrate", *_unless_default(model)] if model in BUILTIN_MODELS or "/" in model else []
    elif name == "env":
        words = ["kvcli", "demo"]
    return shlex.join(str(word) for word in words)


def _model_of(artifact: str) -> list[str]:
    """The model of an artifact as an argument."""
    try:
        return _unless_default(json.loads((Path(artifact) / "kvcli.json").read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _unless_default(model: str) -> list[str]:
    return [] if model == DEFAULT_MODEL else [model]


def _what(artifact: Path | None, method: str) -> list[Any]:
    """Options of `eval` that measure what was generated with."""
    if artifact is not None:
        return ["--artifact", artifact]
    return [] if method == BASELINE else ["--method", method]


def _try(method: str, command: str, model: Sequence[str] = ()) -> list[Any]:
    """A command with a method, or the first step towards the artifact that the method needs."""
    if parse_method(method)[0].needs_artifact:
        return ["kvcli", "calibrate", *model]
    return ["kvcli", command, *model, "--method", method]


def _last_method(rows: list[Mapping[str, Any]]) -> str:
    """The last method measured that compresses, else one that needs no artifact."""
    names = [str(row["method"]) for row in rows if row["method"] != BASELINE]
    return names[-1] if names else next(name for name in METHODS if name not in (BASELINE, DEFAULT_METHOD))
