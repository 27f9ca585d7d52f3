"""Sealed JSON files: an object with a format version and the sha256 of its own fields, checked when it is read."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from kvcli.errors import KvcliError, explain
from kvcli.storage.atomic import replacing

_SEAL = "sha256"
_MAX_BYTES = 256 * 2**20
_SHOWN_DIFFERENCES = 3
_SHOWN_CHARACTERS = 60
_MISSING = "nothing"


class Sealed(BaseModel):
    """The content of a sealed JSON file: subclasses have its fields, with types and ranges, and a format version."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)

    VERSION: ClassVar[int]
    ERROR: ClassVar[type[KvcliError]]
    REMEDY: ClassVar[str]  # what to do about a file that cannot be used, an end of a sentence
    MISSING: ClassVar[str] = ""  # the error where there is no file, with `{folder}`
    _values: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """All fields as plain JSON values, also those that the class does not have, without the checksum."""
        return self._values

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads and checks a file.

        `ERROR`: missing, damaged, of another format version, changed after it was written, or with fields of other
        types or ranges.
        """
        if cls.MISSING and not path.exists():
            raise cls.ERROR(cls.MISSING.format(folder=path.parent))
        return cls.unseal(path, str(path))

    def sealed(self) -> str:
        """The fields with the format version and a checksum, as one line of JSON; `unseal` is the inverse."""
        return _sealed({"format_version": self.VERSION, **self.model_dump(mode="json")})

    @classmethod
    def unseal(cls, source: str | Path, name: str, remedy: str = "") -> Self:
        """Reads and checks a JSON object of `sealed`, or a file with it, which messages call `name`.

        `ERROR` as for `read`, with the remedy, by default the class's.
        """
        remedy = remedy or cls.REMEDY
        values = read_sealed(source, cls.VERSION, remedy, cls.ERROR, name)
        try:
            manifest = cls.model_validate_json(json.dumps(values))  # where lists become tuples, and nothing else
        except ValidationError as error:
            raise cls.ERROR(f"{name} is damaged ({' '.join(explain(error, ()).split())}); {remedy}") from error
        manifest._values = values
        return manifest


class RunManifest(Sealed):
    """The settings of a run folder, whose work resumes after a kill; a finished run may add fields."""

    FILE: ClassVar[str]
    KIND: ClassVar[str]  # what the run is called in messages
    STALE: ClassVar[tuple[str, ...]]  # patterns of the run's other files

    @classmethod
    def open(cls, folder: Path, description: Mapping[str, Any], *, overwrite: bool = False) -> Self:
        """Makes a run folder, or checks that the run in it is the same one, which then resumes.

        Half-written files of a killed process are removed, files of other names stay. The description is the run's
        settings, plain JSON values; what is returned may have what a finished run added. `overwrite` discards a run
        that is in the folder, also the same one; without it, `ERROR` names in what the folder's run is another.
        """
        path = folder / cls.FILE
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in (*cls.STALE, cls.FILE):
            for temporary in folder.glob(pattern + ".tmp"):
                temporary.unlink(missing_ok=True)
        ours = json.loads(json.dumps(description))
        files = [file for pattern in cls.STALE for file in folder.glob(pattern)]
        if not overwrite and (path.exists() or files):
            if reason := _other_run(path, ours):
                raise cls.ERROR(
                    f"{folder} holds another {cls.KIND} ({reason}); choose another --out or discard it with --overwrite"
                )
            return cls.read(path)
        for file in files:  # the manifest last: what a kill leaves can be resumed as the run that it was
            file.unlink(missing_ok=True)
        write_sealed(path, ours)
        return cls.read(path)


def json_sha256(values: Mapping[str, Any]) -> str:
    """sha256 of plain JSON values, whatever the order of their names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Writes one JSON object with the sha256 of its fields; it appears under its name only when complete."""
    with replacing(path) as temporary:
        temporary.write_text(_sealed(values, indent=2) + "\n")


def read_sealed(
    source: str | Path, version: int, remedy: str, error: type[Exception], name: str = ""
) -> dict[str, Any]:
    """The fields, of any types and ranges, that `write_sealed` wrote: of one JSON object, or of a file with it.

    `error` is raised if it is damaged, has another format version or was changed after it was written; the message
    calls it `name`, by default the file's path, and ends with the remedy.
    """
    name = name or str(source)
    try:
        values, intact = _unsealed(source)
    except (OSError, ValueError, RecursionError) as reason:
        raise error(f"{name} is damaged ({_short(' '.join(str(reason).split()))}); {remedy}") from reason
    if (theirs := values.get("format_version", 1)) != version:
        raise error(f"{name} has format version {_short(theirs)}; this kvcli reads version {version}; {remedy}")
    if not intact:
        raise error(f"{name} is damaged: it was changed after it was written (its sha256 differs); {remedy}")
    return values


def _sealed(values: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps({**values, _SEAL: json_sha256(values)}, indent=indent)


def _unsealed(source: str | Path) -> tuple[dict[str, Any], bool]:
    """A JSON object without its seal, and whether the seal is that of the other fields."""
    if isinstance(source, Path):
        if not source.is_file():
            raise FileNotFoundError("no such file")
        if source.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES // 2**20} MiB")
        source = source.read_text()
    values = json.loads(source)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    seal = values.pop(_SEAL, None)
    return values, seal == json_sha256(values)


def _other_run(path: Path, ours: Mapping[str, Any]) -> str | None:
    """Why a folder with this manifest does not have our run: the first settings that differ, each with both values."""
    if not path.exists():
        return f"its {path.name} is missing"
    try:
        values, intact = _unsealed(path)
        theirs = {name: values.get(name, _MISSING) for name in ours}
        there, here = dict(flattened(theirs)), dict(flattened(ours))
    except (OSError, ValueError, RecursionError):
        values = {}
    if not values:
        return f"its {path.name} is damaged"
    if theirs == ours:
        return None if intact else f"its {path.name} is damaged: it was changed after it was written"
    pairs = [(name, there.get(name, _MISSING), here.get(name, _MISSING)) for name in {**there, **here}]
    shown = [f"{name}: {_short(a)} there, {_short(b)} here" for name, a, b in pairs if a != b]
    if len(shown) > _SHOWN_DIFFERENCES:
        shown[_SHOWN_DIFFERENCES:] = [f"and {len(shown) - _SHOWN_DIFFERENCES} more"]
    return f"differs in {'; '.join(shown)}"


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of all settings, also inside of objects, such as `config.bits`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
