"""Every error the library raises on purpose, each with the exit code the command line gives it.

This module does not know how errors are printed: `kvcli.cli.output` does. It imports little: the command line loads it
before everything else.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class KvcliError(Exception):
    """A failure with a cause a user can act on; its text is one line that names cause and cure."""

    exit_code = 1


class UsageError(KvcliError):
    """A request that cannot be met: an unknown value, two options that exclude each other, a missing input."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value or file that cannot be used."""


class ModelError(KvcliError):
    """A model that cannot be found, downloaded, verified or loaded."""


class UnsupportedModelError(ModelError):
    """A model whose architecture kvcli does not compress; the message names what is unsupported."""


class CorpusError(KvcliError):
    """A calibration or evaluation corpus that is missing, empty or malformed."""


class SamplesError(KvcliError):
    """Recorded calibration samples that are missing, incomplete or belong to another run."""


class RankError(KvcliError):
    """Another process of the same run has ended, or cannot be reached."""


class ArtifactError(KvcliError):
    """An artifact that is missing, corrupt, of another format version or made for another model."""


class CacheError(KvcliError):
    """An operation the compressed cache cannot do, such as cropping into encoded tokens."""


class ContextError(KvcliError):
    """A stored context that is missing, damaged or of another model, method or artifact."""


class ChunkError(KvcliError):
    """A chunk of LMCache that cannot be stored as codes, or stored bytes that are not the codes asked for."""


class QualityGateError(KvcliError):
    """Measured quality is below what was asked for; the measurement itself succeeded."""

    exit_code = 3


class OutputError(KvcliError):
    """Standard output is closed or full."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; like Ctrl-C, it passes by handlers of `Exception`."""

    exit_code = 4


def error_text(error: BaseException) -> str:
    """A message without line breaks, for the one line that an error takes."""
    return " ".join(str(error).split())


def explain(error: ValidationError, known: Collection[str]) -> str:
    """The first wrong setting and why; for one that does not exist, the closest of the `known` names or all."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"there is no setting '{name}'{suggestion(name, known) or '; settings are ' + ', '.join(known)}"
    if first["type"] == "model_type" and not name:
        return "it does not hold names with values"
    return f"{name or 'settings'}: {first['msg'].removeprefix('Value error, ')}"


def suggestion(name: str, known: Collection[str]) -> str:
    """`; did you mean 'x'?` where a known name is close to a name, else an empty string."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
