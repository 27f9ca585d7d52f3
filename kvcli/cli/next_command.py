"""What to type after a command: the next step with the paths that the command has just written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
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
    if options.get("dry_run"):
        words = []
    elif name in ("calibrate", "merge"):
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
        context = record["contexts"][0]["context"]
        words = ["kvcli", "generate", *where, "--context", context, *store, "--prompt", FOLLOW_UP]
    elif name == "chat":
        words = ["kvcli", "chat", "--resume", record["saved"]] if record["saved"] else []
    elif name == "eval":
        words = ["kvcli", "bench", "--method", _last_method(record["rows"])]
    elif name == "bench":
        words = _try(_last_method(record["rows"]), "eval")
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


def _try(method: str, command: str) -> list[Any]:
    """A command with a method, or the first step towards the artifact that the method needs."""
    if parse_method(method)[0].needs_artifact:
        return ["kvcli", "calibrate"]
    return ["kvcli", command, "--method", method]


def _last_method(rows: list[Mapping[str, Any]]) -> str:
    """The last method measured that compresses, else one that needs no artifact."""
    names = [str(row["method"]) for row in rows if row["method"] != BASELINE]
    return names[-1] if names else next(name for name in METHODS if name not in (BASELINE, DEFAULT_METHOD))
